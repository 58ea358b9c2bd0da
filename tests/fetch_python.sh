# Sourced by scripts that need Python's source.

# fetch_python FOLDER RELEASE PACKAGE [PATTERN ...]: Debian's source package, through this machine's
# own mirror and settings; all of it, or the files that match.
fetch_python() (
    key=/usr/share/keyrings/debian-archive-keyring.gpg
    mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/debian.* 2>/dev/null |
        sed -n 's/^URIs: *//p; s/^deb \(\[[^]]*\] \)\?\([^ ]*\) .*/\2/p' | sed q)
    mkdir -p "$1/lists"
    cd "$1"
    echo "deb-src [signed-by=$key] $mirror $2 main" >sources.list
    apt=(apt-get -qq -o "Dir::Etc::SourceList=$PWD/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$PWD/lists" -o "Dir::Cache=$PWD")
    "${apt[@]}" update
    "${apt[@]}" source --download-only "$3"
    tar --extract --strip-components 1 --file "$3"_*.orig.tar.* --wildcards "${@:4}"
)
