"""Forward and backward of a mini-batch with log-normal lengths: packed without padding, against
padded as in TRL.

The same 32 sequences and the same weights of a 4.2-million-parameter Llama, float32, one thread.
The peer is transformers' SDPA on the padded rows with the two ways TRL has of scoring the
completion tokens. Log-probabilities and the norm of the gradient are asserted equal. The ideal is
padded tokens over useful tokens: what is gained if only the padding's share of the work goes.
Attention grows with the square of a length, so more can be gained than that.
"""

import statistics
import tempfile

import numpy as np

from benchmarks.harness import Report, Side, interleave, sized
from benchmarks.sides.packing_data import columns

ROUNDS = sized(3, 1)


def main() -> None:
    report = Report("packing", "Packed against padded mini-batch, forward and backward, one thread")
    mask = columns()["attention_mask"]
    ideal = mask.size / int(mask.sum())
    ours = Side("ours", "packing_ours.py", "project")
    peers = [
        Side(f"TRL padded, {head}", "packing_trl.py", "peers") for head in ("fused head", "logits")
    ]
    with tempfile.TemporaryDirectory() as path:
        ours.call("write", path=path)
        ours.call("load", path=path)
        for index, peer in enumerate(peers):
            peer.call("load", path=path, fused=index == 0)
    results = interleave([ours, *peers], ROUNDS, "step", warm_up=1)
    expected = results[ours.name][0]
    for name, (first, *_) in results.items():
        difference = np.abs(first["log_probs"] - expected["log_probs"]).max()
        assert difference < 1e-4, f"{name}: log-probabilities differ by {difference:.1e}"
        relative = abs(first["grad_norm"] / expected["grad_norm"] - 1)
        assert relative < 1e-4, f"{name}: the gradient's norm differs by {relative:.1e}"
    rates = {
        name: [int(mask.sum()) / result["seconds"] for result in found]
        for name, found in results.items()
    }
    for name, values in rates.items():
        report.row(name, "useful tokens/s", values)
    best = max(statistics.median(rates[peer.name]) for peer in peers)
    gain = statistics.median(rates[ours.name]) / best
    report.note(
        f"{mask.sum()} useful of {mask.size} padded tokens: ideal {ideal:.2f}; ours over the "
        f"faster peer {gain:.2f}."
    )
    report.target("gain over the ideal given by token counts", gain / ideal, ">=", 0.95)
    for side in [ours, *peers]:
        side.close()
    report.write()


if __name__ == "__main__":
    main()
