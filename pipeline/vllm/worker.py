"""A process that samples with vLLM; client.py starts it, and sends it a request after the other.

It imports vLLM and nothing of this project, so that it runs under an interpreter that has only that.
"""

import json
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection


def main() -> None:
    """Load a model, send None or what is wrong, then answer each request.

    Its arguments: the model's options, the file descriptor of the connection, and the process id of its parent.
    """
    options, descriptor, parent = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    sys.path.pop(0)  # this folder, whose files have names that others have too
    os.set_inheritable(descriptor, False)
    client = Connection(descriptor)
    try:
        import vllm

        llm = vllm.LLM(enable_prefix_caching=True, **options)
    except Exception as error:  # whatever it is, the client tells it in a line; in full it is among the messages
        client.send(f"{type(error).__name__}: {error}")
        raise
    client.send(None)
    while True:
        request = client.recv()
        seeds = range(request["seed"], request["seed"] + request["n"] * len(request["prompts"]), request["n"])
        # Completion k of a prompt is drawn with its seed + k. logprobs=0: those of the chosen tokens and no others.
        settings = [vllm.SamplingParams(n=request["n"], seed=s, logprobs=0, **request["sampling"]) for s in seeds]
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        outputs = llm.generate(prompts, settings, use_tqdm=False)
        client.send([[_plain(completion) for completion in output.outputs] for output in outputs])


def _end_with(parent: int) -> None:
    """End this process and those it has started, whatever they do, when its own parent is gone: they hold GPUs."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpid(), signal.SIGKILL)  # the client makes it the first of a group


def _plain(completion: "vllm.CompletionOutput") -> dict:  # noqa: F821
    token_ids = list(completion.token_ids)
    pairs = zip(token_ids, completion.logprobs, strict=True)
    return {
        "token_ids": token_ids,
        "token_logmu": [round(known[token].logprob, 7) for token, known in pairs],
        "finish_reason": completion.finish_reason,
    }


if __name__ == "__main__":
    main()
