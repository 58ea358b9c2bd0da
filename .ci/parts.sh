# Sourced by .ci/run and .ci/nightly: parts, each with a line that says how it ended, and packages.

# Debian's packages that a part needs beyond the README's; what cannot be had, the part misses
# itself.
install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    dpkg --status "$@" >/dev/null 2>&1 && return 0
    apt-get -qq update || true
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null ||
        echo "ci: could not install $*"
}

# A line a part; a file, since parts may run side by side.
summary=$(mktemp)
part() { # NAME COMMAND ...
    local name=$1 started=$SECONDS status=0
    shift
    echo "ci: $name: $*"
    "$@" </dev/null || status=$?
    local took=$(((SECONDS - started + 30) / 60))
    case $status in
    0) echo "ci: $name: passed in $took min" ;;
    75) echo "ci: $name: cannot run here" ;;
    *) echo "ci: $name: FAILED ($status) after $took min" ;;
    esac | tee -a "$summary"
}

# The summary comes last, however the run ends; a part that failed makes it fail.
finish() {
    local status=$?
    echo
    cat "$summary"
    if grep -q ": FAILED" "$summary"; then status=1; fi
    if [ $status = 0 ]; then echo "ci: passed in $((SECONDS / 60)) min"
    else echo "ci: FAILED after $((SECONDS / 60)) min"; fi
    rm -f "$summary"
    [ -z "${bare:-}" ] || rm -rf --one-file-system "$bare"
    exit $status
}
trap finish EXIT
