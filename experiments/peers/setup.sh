#!/usr/bin/env bash
# setup.sh FOLDER [base|torchrl|sf|puffer|unilab ...]: virtual environments with pinned peers in FOLDER. The first four are made
# if none is named: seven minutes, 5 GB. unilab: two minutes, 2 GB.
set -euo pipefail
mkdir -p "${1:?usage: setup.sh FOLDER [base|torchrl|sf|puffer|unilab ...]}"
folder=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- base torchrl sf puffer

constraints=$(cd "$(dirname "$0")/../.." && pwd)/constraints.txt

make_env() { # NAME PACKAGE...: torch first and pinned, as the Makefile does: an unpinned one brings gigabytes of CUDA
    local env=$folder/$1
    shift
    [ -d "$env/bin" ] || { "${PYTHON:-python3.11}" -m venv "$env"; "$env/bin/pip" -q install wheel "setuptools<81"; "$env/bin/pip" -q install -c "$constraints" torch; }
    "$env/bin/pip" -q install "$@"
}

base() {
    make_env base "gymnasium[mujoco]==1.4.0" envpool==1.2.5 stable-baselines3==2.9.2 skrl==2.1.1 rl-games==1.6.5 rsl-rl-lib==5.5.1 py-spy==0.4.3
}

torchrl() {
    make_env torchrl "gymnasium[mujoco]==1.4.0" envpool==1.2.5 torchrl==0.14.1
}

sf() {
    make_env sf sample-factory==2.1.1
    make_env sf "gymnasium[mujoco]==1.4.0" envpool==1.2.5 # pip complains: run_sample_factory.py makes them work together
}

puffer() { # In a subshell, for the trap.
    # Without PufferLib's games in C, which it fetches while it is built. Its switch for that forgets a variable; and where nvcc is
    # on the PATH it would build for CUDA, which a torch for CPUs refuses.
    make_env puffer "numpy<2" cython "gymnasium[mujoco]==1.4.0" gym==0.23.1 pettingzoo==1.24.1 shimmy psutil pynvml rich rich_argparse \
        imageio heavyball pyro-ppl wandb neptune envpool==1.2.5
    source=$(mktemp -d)
    trap 'rm -rf "$source"' EXIT
    export PATH=$folder/puffer/bin:/usr/bin:/bin NO_OCEAN=1 TMPDIR=$source
    pip install --no-clean --force-reinstall --no-deps --no-build-isolation pufferlib==3.0.0 >/dev/null 2>&1 || true # leaves its source
    cd "$source"/pip-install-*/pufferlib_*
    sed -i 's/^c_extensions = \[\]/c_extensions = []\nc_extension_paths = []/' setup.py
    pip -q install --no-deps --no-build-isolation .
}

unilab() {
    make_env unilab "unilab[mujoco]==1.5.2"
    # It looks for its files where its repository has them.
    mkdir -p "$folder/unilab/src"
    ln -sfn "$(echo "$folder"/unilab/lib/python3*/site-packages/unilab)" "$folder/unilab/src/unilab"
    # The robot's meshes, which it would fetch from Hugging Face, are only looked at: its collisions and inertias are in the model.
    local robot=$folder/unilab/src/unilab/assets/robots/go2 mesh
    mkdir -p "$robot/assets"
    for mesh in $(grep -oh 'file="[^"]*\.obj"' "$robot"/*.xml | cut -d'"' -f2 | sort -u); do
        printf 'v 0 0 0\nv .01 0 0\nv 0 .01 0\nv 0 0 .01\nf 1 3 2\nf 1 2 4\nf 1 4 3\nf 2 3 4\n' > "$robot/assets/$mesh"
    done
}

for name in "$@"; do
    case $name in
        base | torchrl | sf | unilab) "$name" ;;
        puffer) (puffer) ;;
        *) echo "setup.sh: no environment $name: base, torchrl, sf, puffer, unilab" >&2; exit 2 ;;
    esac
done
