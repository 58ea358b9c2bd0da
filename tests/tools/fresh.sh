#!/usr/bin/env bash
# The README on a bare machine: makes a bare Debian in a folder, installs what the README names and
# nothing else, and runs commands there as a newcomer would, in a clone of this project's HEAD. Run
# by `make test-fresh`. Needs root and debootstrap; exits with 75 where no such system can be made.
#
#   tests/tools/fresh.sh [COMMAND ...]  by default the README's blocks of commands, each in a clone
#   FRESH_RELEASE=trixie            another Debian than this machine's, and with it another Python
#   FRESH_ROOT=folder               keeps the bare system there and takes it again the next time
#   FRESH_WITH=folder               a copy of it stands in each clone, under its own name
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/tools/debian.sh
release=${FRESH_RELEASE:-$(. /etc/os-release && echo "${VERSION_CODENAME:-}")}
home=/home/newcomer

# This machine's way to packages: the settings of apt and pip, certificates, names of hosts.
copy_settings() {
    cp -r /etc/apt/apt.conf.d "$root/etc/apt/" 2>/dev/null || true
    rm -f "$root"/etc/apt/apt.conf.d/docker*
    mkdir -p "$root$home/.config"
    cp /etc/pip.conf "$root/etc/" 2>/dev/null || true
    cp -rL ~/.config/pip "$root$home/.config/" 2>/dev/null || true
    cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
}

make_system() {
    [ -n "$release" ] || { echo "fresh: this is no Debian: give FRESH_RELEASE"; return 1; }
    # shellcheck disable=SC2046
    debootstrap --variant=minbase "$release" "$root" $(mirror) >"$root.log" 2>&1 ||
        { tail -5 "$root.log"; return 1; }
    chroot "$root" useradd --create-home newcomer
    copy_settings
    rm "$root.log"
    touch "$root/ready"
}

# Folders that pip's settings name, such as a mirror on this disk, are to be seen inside, too. What
# lies there may refer to its neighbours, so each is mounted from its first level on.
mount_what_pip_reads() {
    { cat /etc/pip.conf ~/.config/pip/pip.conf 2>/dev/null || true; env | grep ^PIP_ || true; } |
        grep -oE '(=|file://|[[:space:]])/[^/[:space:]]+/' | grep -oE '/[^/]+/$' | sort -u |
        while read -r folder; do
            case $folder in /etc/ | /usr/ | /home/ | /root/ | /tmp/) continue ;; esac
            [ -d "$folder" ] || continue
            mkdir -p "$root$folder"
            mount --rbind "$folder" "$root$folder"
        done
}

mapfile -t network < <(env | grep -E '^(PIP_|SSL_CERT_|REQUESTS_CA_BUNDLE=|[a-z_]+_proxy=|[A-Z_]+_PROXY=)')
as() {
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME="$home" DEBIAN_FRONTEND=noninteractive \
        "${network[@]}" chroot --userspec="$1" "$root" bash -c "$2" </dev/null
}

run_inside() {
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount_what_pip_reads
    packages=$(sed -n 's/.*(Debian: `apt install \([^`]*\)`).*/\1/p' README.md)
    as root "apt-get -qq update && apt-get -qq install -y --no-install-recommends $packages" >/dev/null
    if [ -e /etc/ssl/certs/ca-certificates.crt ]; then
        mkdir -p "$root/etc/ssl/certs"
        cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    fi
    # shellcheck disable=SC2016
    echo "fresh: $(as newcomer '. /etc/os-release && echo "$PRETTY_NAME, $(python3 --version)"')"
    if [ $# -gt 0 ]; then
        clone
        for commands in "$@"; do try "$commands"; done
        return
    fi
    mapfile -d $'\f' -t blocks < <(awk '/^```sh/ {inside = 1; next} /^```/ {if (inside) printf "\f"
                                       inside = 0} inside {sub(/ *#.*/, ""); print}' README.md)
    [ ${#blocks[@]} -ge 2 ] || { echo "fresh: found no commands in the README"; exit 1; }
    for block in "${blocks[@]}"; do
        clone
        try "$block"
    done
}

clone() {
    rm -rf "$root$home/project"
    git clone --quiet --no-local . "$root$home/project"
    [ -z "${FRESH_WITH:-}" ] || cp -r "$FRESH_WITH" "$root$home/project/"
    as root "chown -R newcomer: $home"
}

try() {
    local started=$SECONDS name=${1//$'\n'/; }
    if as newcomer "set -e; cd $home/project; $1"; then
        echo "fresh: $release: '${name%; }' passed in $((SECONDS - started)) s"
    else
        echo "fresh: $release: '${name%; }' FAILED after $((SECONDS - started)) s"
        exit 1
    fi
}

if [ -n "${FRESH_NAMESPACE:-}" ]; then # see below
    root=$FRESH_ROOT
    if [ ! -e "$root/ready" ]; then make_system || exit 75; fi
    run_inside "$@"
    exit
fi

[ $# -gt 0 ] || set -- "make run" "make test"
cannot() { echo "fresh: no bare system here: $1"; exit 75; }
[ "$(id -u)" = 0 ] || cannot "it needs root"
command -v debootstrap >/dev/null || cannot "debootstrap is missing (Debian: apt install debootstrap)"
unshare --mount true 2>/dev/null || cannot "this root may not mount file systems"

# Mounts are made in a namespace of their own and end with it, so that removing the folder
# afterwards can reach nothing of this machine.
if [ -z "${FRESH_ROOT:-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf --one-file-system "$folder"' EXIT
    FRESH_ROOT=$folder/debian
fi
mkdir -p "$FRESH_ROOT"
FRESH_ROOT=$(realpath "$FRESH_ROOT") FRESH_NAMESPACE=1 unshare --mount --propagation private tests/tools/fresh.sh "$@"
