"""What a daemon has to be told for gVisor to hold sandboxes, for people.

- Files go in and out beside gVisor, through the daemon: it must not keep them in caches or layers of its own.
- Its platform `kvm` hangs where /dev/kvm is there and does not work; `ptrace` works everywhere.
- Its own network cannot be made everywhere, and a failed start leaves processes; sandboxes need none.
"""

_ARGUMENTS = "--platform=ptrace --network=none --ignore-cgroups --file-access=shared"
ADVICE = (
    f"register it in /etc/docker/daemon.json: a path to a script 'exec runsc {_ARGUMENTS} \"$@\"' under "
    "runtimes, named runsc (releases since 2023 need --overlay2=none, too; leave --ignore-cgroups out where "
    "it can make cgroups, so that limits are kept), and restart dockerd"
)
ABSENT = f"not known to the daemon: apt install runsc, or see gvisor.dev/docs; then {ADVICE}"
CHECKPOINTS = 'set "experimental": true in /etc/docker/daemon.json and use runtime = "runsc"'
