"""A process that samples with vLLM: one JSON object a line in, one a line out; started by client.py.

It imports vLLM and nothing of this project, so that it runs under an interpreter that has only that.
"""

import json
import os
import signal
import sys
import threading
import time


def main() -> None:
    """Load the model that the first argument describes, answer `{"ready": version}`, then a line for each request."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    sys.path.pop(0)  # this folder, whose files have names that others have too
    # What libraries print must not get among the answers: it goes where standard error goes.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        import vllm

        llm = vllm.LLM(enable_prefix_caching=True, **json.loads(sys.argv[1]))
    except Exception as error:  # whatever it is, it is told in a line there, and in full on standard error here
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
    answer({"ready": vllm.__version__})
    for line in sys.stdin:
        request = json.loads(line)
        seeds = range(request["seed"], request["seed"] + request["n"] * len(request["prompts"]), request["n"])
        # Completion k of a prompt is drawn with its seed + k. logprobs=0: those of the chosen tokens and no others.
        settings = [vllm.SamplingParams(n=request["n"], seed=s, logprobs=0, **request["sampling"]) for s in seeds]
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        outputs = llm.generate(prompts, settings, use_tqdm=False)
        answer({"completions": [[_to_json(completion) for completion in output.outputs] for output in outputs]})


def _end_with_parent(parent: int) -> None:
    """End this process and those it has started, whatever they do, when its own parent is gone: they hold GPUs."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpid(), signal.SIGKILL)  # the client makes it the first of a group


def _to_json(completion: "vllm.CompletionOutput") -> dict:  # noqa: F821
    token_ids = list(completion.token_ids)
    pairs = zip(token_ids, completion.logprobs, strict=True)
    return {
        "token_ids": token_ids,
        "token_logmu": [round(known[token].logprob, 7) for token, known in pairs],
        "finish_reason": completion.finish_reason,
    }


if __name__ == "__main__":
    main()
