"""Search for bytes that the decoder neither takes nor refuses, guided by what they reach.

    make fuzz SECONDS=60

Atheris watches which branches of the decoder's Python an input takes, and keeps what reached new
ones; what msgspec does in C it does not see. A failure is written to a file `crash-…` here.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports():
    from tests.hostile import decoder

from tests.hostile.mutations import BODY_TOKENS, SEEDS

BODY_BYTES_MAX = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(SEEDS):
            (corpus / str(number)).write_bytes(seed)
        words = folder / "words"
        words.write_text("".join(f'"{_escaped(token)}"\n' for token in BODY_TOKENS))
        flags = {
            "max_total_time": options.seconds,
            "seed": options.seed,
            "max_len": BODY_BYTES_MAX,
            "timeout": int(decoder.SECONDS_MAX),
            "dict": words,
            "print_final_stats": 1,
        }
        arguments = [f"-{name}={value}" for name, value in flags.items()]
        atheris.Setup(["fuzz_decoder", *arguments, str(corpus)], _check)
        atheris.Fuzz()


def _escaped(token: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in token)


def _check(data: bytes) -> None:
    decoder.check(data)


if __name__ == "__main__":
    main()
