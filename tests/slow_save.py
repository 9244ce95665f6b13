"""train_gsm8k.py on a slow disk: a checkpoint takes half a minute more, longer than torchrun waits by itself."""

import time

import train_gsm8k as gsm8k
from pipeline.runtime import checkpoints

SECONDS = 33


def main():
    seal = checkpoints.seal_folder

    def seal_slowly(folder):
        if folder.name.startswith("checkpoint-"):
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:  # a signal does not end the wait
                time.sleep(0.1)
        seal(folder)

    checkpoints.seal_folder = seal_slowly
    gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)


if __name__ == "__main__":
    main()
