# Sourced by what makes Debians in folders: where this machine gets its packages from.

# The first of this machine's sources of packages; none: debootstrap's own.
mirror() {
    cat /etc/apt/sources.list /etc/apt/sources.list.d/debian.* 2>/dev/null |
        sed -nE 's/^URIs: *([^ ]+).*/\1/p; s/^deb (\[[^]]*\] )?([^ ]+) .*/\2/p' | sed 1q
}
