# Sourced by what makes Debians in folders: where this machine gets its packages from.

# The first of this machine's sources of packages; none: debootstrap's own.
mirror() {
    cat /etc/apt/sources.list /etc/apt/sources.list.d/debian.* 2>/dev/null |
        sed -nE 's/^URIs: *([^ ]+).*/\1/p; s/^deb (\[[^]]*\] )?([^ ]+) .*/\2/p' | sed 1q
}

# What apt-get does in folder $1 with the archive of release $2, of packages or (deb-src) of
# sources; the machine's own lists stay as they are.
apt_of_release() { # FOLDER RELEASE deb|deb-src ARGUMENT ...
    local folder=$1 release=$2 kind=$3 key=/usr/share/keyrings/debian-archive-keyring.gpg
    shift 3
    mkdir -p "$folder/lists"
    echo "$kind [signed-by=$key] $(mirror) $release main" >"$folder/sources.list"
    local apt=(apt-get -qq -o "Dir::Etc::SourceList=$folder/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder" -o APT::Sandbox::User=root)
    "${apt[@]}" update
    (cd "$folder" && "${apt[@]}" "$@")
}

# What a function prints goes into a log; an error ends it (within || or an if it would go on).
logged() { # LOG FUNCTION
    local status
    set +e
    (set -e; "$2") >"$1" 2>&1
    status=$?
    set -e
    [ $status = 0 ] || { tail -20 "$1"; exit 1; }
}

# The source of a package, unpacked in $1/PACKAGE.
fetch_source() { # FOLDER RELEASE PACKAGE
    apt_of_release "$1" "$2" deb-src source --download-only "$3"
    mkdir -p "$1/$3"
    local archive
    archive=$(find "$1" -maxdepth 1 -name "$3_*.orig.tar.*" ! -name '*.asc') # not its signature
    tar --extract --strip-components 1 --directory "$1/$3" --file "$archive"
}
