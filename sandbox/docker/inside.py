"""What runs inside a container: POSIX sh, with nothing but builtins where it has to work among fork bombs.

The container's command is `main`, with three processes below it:

    main ── relay        reads stdin: lines with a colon are the shell's, the others are orders to it
         └─ monitor ── guard ── the shell       a guard starts the shell, again whenever that ends

Output is stdout, reports are stderr (descriptors 8 and 9); commands are given the first alone.  Orders:

    check MARK TOKEN                    print MARK behind the output; report TOKEN, out-of-memory kills
    end TOKEN SHELL TICKS PID SIGNAL    kill what started after TICKS and PID (and send USR1 to the shell)
    kill PID                            kill the shell itself
    stop MARK PID                       kill everything of one `exec`

- Processes are frozen before they are killed, so that none escapes by forking.
- When stdin ends its owner is gone: `main` is killed, and with it the container.  Likewise when somebody
  inside has killed the guard.
"""

import shlex

from sostenuto.sandbox.shell import SHELLS

_COUNT = """
count_kills() {
  kills=0
  for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    [ -r "$file" ] || continue
    while read -r key value; do [ "$key" = oom_kill ] && kills=$value; done <"$file"
  done
}
"""
"""cgroup v2 and v1.  Elsewhere the count stays 0."""

_SWEEP = """
stat_of() {
  read -r stat_line <"/proc/$1/stat" || return
  set -- ${stat_line##*") "}
  state=$1 parent=$2 session=$4 began=${20}
}
below() {
  up=$1
  while [ "$up" -gt 1 ] && [ "$up" != "$2" ]; do stat_of "$up" || return; up=$parent; done
  [ "$up" = "$2" ]
}
marked() {
  while read -r variable || [ -n "$variable" ]; do
    case $variable in *"$mark"*) return 0 ;; esac
  done <"/proc/$pid/environ"
  return 1
}
of_command() {
  case "$spared " in *" $pid "*) return 1 ;; esac
  [ "$parent" != "$$" ] || return
  [ "$began" -gt "$since" ] || { [ "$began" = "$since" ] && [ "$pid" -gt "$last" ]; } || return
  below "$pid" 1
}
of_exec() { [ "$session" = "$root" ] || marked || below "$pid" "$root"; }
sweep() {
  again=0
  for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}
    stat_of "$pid" || continue
    case $2$state in KILLZ | KILLX | STOP[TtZX]) continue ;; esac
    "$1" && kill "-$2" "$pid" && again=1
  done
}
end_all() {
  for signal in STOP KILL; do
    turns=0
    while sweep "$1" $signal; [ $again = 1 ] && [ $turns -lt 100 ]; do turns=$((turns + 1)); done
  done
}
spare() {
  spared= up=$1
  while [ "$up" -gt 1 ]; do
    spared="$spared $up"
    stat_of "$up" || return
    up=$parent
  done
}
obey() {
  case $1 in
    check) count_kills; printf %s "$2" >&8; printf '%s %d\\n' "$3" "$kills" >&9 ;;
    end)
      since=$4 last=$5
      spare "$3"
      kill -CONT $spared
      [ "$6" = 1 ] && kill -USR1 "$3"
      end_all of_command
      printf '%s 0\\n' "$2" >&9 ;;
    kill) kill -KILL "$2" ;;
    stop) mark=$2 root=$3; end_all of_exec ;;
  esac
}
relay() {
  while IFS= read -r order; do
    case $order in
      :*) printf '%s\\n' "${order#:}" ;;
      *) obey $order ;;
    esac
  done
  kill -KILL $$
}
"""

_MAIN = """
exec 9>&2 8>&1 2>/dev/null
relay | { sh -c "$1"; kill -KILL $$; }
"""

_GUARD = """
exec >&8 2>&8
while read -r word name; do
  [ "$word" = go ] || continue
  SHELL
  printf 'exit.%s %d\\n' "$name" $? >&9
done
"""

_EXEC = """
exec 9>&2 2>&1
count_kills
before=$kills
printf 'pid %d\\n' $$ >&9
LIKELIER_VICTIM
(exec "$@" 9>&-)
code=$?
count_kills
printf %s "$SOSTENUTO_EXEC"
printf 'exit %d\\nkills %d\\n' $code $((kills - before)) >&9
"""

WORKSPACE = "/workspace"
EXEC_VARIABLE = "SOSTENUTO_EXEC"
"""Holds the mark of an `exec`, by which its processes are known."""
LIKELIER_VICTIM = "command echo 300 2>/dev/null >/proc/self/oom_score_adj"
"""When memory runs out, what is started from here is ended before what keeps the sandbox going."""


def main_command(shell: str) -> list[str]:
    return ["sh", "-c", _COUNT + _SWEEP + _MAIN, "sh", _GUARD.replace("SHELL", SHELLS[shell])]


def exec_command(argv: list[str]) -> list[str]:
    return ["sh", "-c", _COUNT + _EXEC.replace("LIKELIER_VICTIM", LIKELIER_VICTIM), "sh", *argv]


def prologue(name: str) -> str:
    """Makes the guard start a shell, and that say so.

    Its trap fails on purpose: that ends the command, and leaves the shell.
    """
    return (
        f":go {name}\n"
        ":trap 'exec 2>/dev/null; : \"${sostenuto_deadline:?}\"' USR1\n"
        f":{LIKELIER_VICTIM}\n"
        f":command printf 'ready.{name} %d\\n' $$ >&9\n"
    )


def command_line(command: str, token: str) -> str:
    """Runs a command; the present and the youngest pid are reported before it, its code after it."""
    text = (
        "command read -r sostenuto_began </proc/uptime; command read -r sostenuto_last </proc/loadavg; "
        f"command printf 'began.{token} %s\\n' \"$sostenuto_began $sostenuto_last\" >&9; "
        f"command eval {shlex.quote(command)} </dev/null >&8 2>&8 8>&- 9>&-; sostenuto_code=$?; {_NO_CLONE}; "
        f"{report(token, '$sostenuto_code')}"
    )
    return ":" + text.replace("\n", "\n:") + "\n"


_NO_CLONE = (
    "command read -r sostenuto_pid sostenuto_rest </proc/self/stat; "
    '[ "$sostenuto_pid" = $$ ] || exit $sostenuto_code'
)
"""A subshell of busybox that meets an error leaves `command eval` as if it were the shell: it ends here."""


def report(token: str, code: str = "$?") -> str:
    return f"command printf '%s %d\\n' {token} {code} >&9"
