# Sourced: the extension by other flags in a folder of its own, beside a copy of mha.

build_apart() { # FOLDER SETTING: into FOLDER/objects and FOLDER/package; SETTING as MHA_SANITIZE=1
    mkdir -p "$1"
    env "$2" .venv/bin/python setup.py --quiet build_ext --build-temp "$1/objects" \
        --build-lib "$1/lib"
    # An object whose source has gone would be taken for one of the others.
    local object source
    find "$1/objects/csrc" -name "*.o" | while read -r object; do
        source=${object#"$1/objects/"}
        [ -e "${source%.o}.c" ] || rm "$object"
    done
    rm -rf "$1/package"
    mkdir "$1/package"
    cp -r mha "$1/package/"
    rm -f "$1"/package/mha/_core*.so
    cp "$1"/lib/mha/_core*.so "$1/package/mha/"
}
