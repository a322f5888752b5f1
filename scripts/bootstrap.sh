#!/bin/sh
# Creates the virtual environment and installs into it, unless it is up to date: `local` for `make run`, `dev` for the tests.
#
#   scripts/bootstrap.sh local|dev
#
# This script finds a suitable Python, which then runs scripts/install.py. Environment variables: VENV, the folder of the
# installation (default: .venv), and PYTHON, the Python to use, including its torch if it has one.
set -eu

refuse() {
    printf '%s\n' "$*" >&2
    exit 2
}

supported="3.11 to 3.14"
extra=${1:-local}
VENV=${VENV:-.venv}
cd "$(dirname "$0")/.."

[ "$(uname -s)" = Linux ] || refuse "Linux is needed, because the agent uses it to supervise processes; this is" \
    "$(uname -s). Use a Linux machine, a virtual one, or a container."

# If the environment is up to date, there is nothing to do.
if [ -z "${PYTHON:-}" ] && [ -x "$VENV/bin/python" ] &&
    "$VENV/bin/python" -I scripts/install.py "$extra" --venv "$VENV" --check 2>/dev/null; then
    exit 0
fi

# Prints the minor version of a Python 3, or nothing: a program on the PATH may be a shim without a Python.
minor_of() {
    "$1" -c 'import sys; print(sys.version_info[1])' 2>/dev/null </dev/null || :
}

# Succeeds if a Python can create environments: Debian and Ubuntu ship Python without the module that installs pip.
makes_environments() {
    command -v uv >/dev/null 2>&1 || "$1" -c 'import ensurepip, venv' 2>/dev/null
}

found=
bare=
if [ -n "${PYTHON:-}" ]; then
    minor=$(minor_of "$PYTHON")
    [ -n "$minor" ] || refuse "PYTHON=$PYTHON cannot be run as a Python; name a Python of version $supported."
    [ "$minor" -ge 11 ] || refuse "PYTHON=$PYTHON is Python 3.$minor; name one of version $supported."
    if makes_environments "$PYTHON"; then found=$PYTHON; else bare=3.$minor; fi
else
    seen=
    for candidate in python3.14 python3.13 python3.12 python3.11 python3; do
        minor=$(minor_of "$candidate")
        [ -n "$minor" ] || continue
        if [ "$minor" -lt 11 ] || [ "$minor" -gt 14 ]; then
            seen="$candidate is 3.$minor. "
        elif makes_environments "$candidate"; then
            found=$candidate
            break
        else
            bare=${bare:-3.$minor}
        fi
    done
fi
[ -n "$found$bare" ] || refuse "Python $supported is needed. ${seen}Install one (Debian, Ubuntu: apt install python3" \
    "python3-venv; Fedora: dnf install python3.12), or name an installed one: make run PYTHON=/path/to/python3.12"
[ -n "$found" ] || refuse "Python $bare cannot create virtual environments, because its module ensurepip is missing." \
    "Install it (Debian, Ubuntu: apt install python$bare-venv), then try again."

exec "$found" scripts/install.py "$extra" --venv "$VENV" ${PYTHON:+--chosen}
