"""A process that samples with vLLM for client.py.

It imports vLLM and nothing of this project, so that it runs under an interpreter that has only that.
"""

import json
import os
import signal
import sys
import threading
import time


def main() -> None:
    """Load a model, answer null or what is wrong, then answer requests. Arguments: vLLM's options, the client's id."""
    options, parent = json.loads(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    sys.path.pop(0)  # this folder, whose files have names that others have too
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is a message
    try:
        import vllm

        llm = vllm.LLM(enable_prefix_caching=True, **options)
    except (
        Exception
    ) as error:  # whatever it is, the client tells it in a line; in full it is among the messages
        print(json.dumps(f"{type(error).__name__}: {error}"), file=answers, flush=True)
        raise
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seeds = range(
            request["seed"], request["seed"] + request["n"] * len(request["prompts"]), request["n"]
        )
        # Completion k of a prompt is drawn with its seed + k. logprobs=0: those of the chosen tokens and no others.
        settings = [
            vllm.SamplingParams(n=request["n"], seed=s, logprobs=0, **request["sampling"])
            for s in seeds
        ]
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        outputs = llm.generate(prompts, settings, use_tqdm=False)
        plain = [[_plain(completion) for completion in output.outputs] for output in outputs]
        print(json.dumps(plain), file=answers, flush=True)


def _end_with(parent: int) -> None:
    """End this process and those it has started, whatever they do, when its own parent is gone: they hold GPUs."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpid(), signal.SIGKILL)  # the client makes it the first of a group


def _plain(completion: "vllm.CompletionOutput") -> dict:  # noqa: F821
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return {
        "token_ids": list(completion.token_ids),
        "token_logmu_engine": [round(logprobs[token].logprob, 7) for token, logprobs in pairs],
        "finish_reason": completion.finish_reason,
    }


if __name__ == "__main__":
    main()
