"""A process that has imported everything, and forks a run for each line that it reads: importing takes the longest.

A line is [log, argument, ...] in JSON. It answers with the process id, and with the exit status when the run has ended.
"""

import json
import os
import sys
import traceback

import train_gsm8k as gsm8k


def run(log: str, arguments: list[str]) -> int:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["train_gsm8k.py", *arguments]
    try:
        gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)
    except SystemExit as ended:
        print(ended.code, file=sys.stderr, flush=True)
        return int(ended.code is not None and ended.code != 0)
    except BaseException:
        traceback.print_exc()
        return 2
    return 0


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        log, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = run(log, arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
