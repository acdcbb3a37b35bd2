"""Validate on several processes and get the numbers of one, although the samples do not divide by the processes.

python examples/exact_evaluation.py                  # three CPU processes, or every GPU
python examples/exact_evaluation.py --devices 2
"""

from __future__ import annotations

import argparse

if __name__ == "__main__":  # before the imports below, which take seconds: --help answers at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, help="processes (default: all GPUs, else 3)")
    arguments = parser.parse_args()

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from accelight.callbacks import ExactEvaluation
from accelight.strategies import AccelFSDPStrategy

NUM_SAMPLES, NUM_CLASSES = 101, 5


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))
        self.scores = MetricCollection([MulticlassAccuracy(NUM_CLASSES), MulticlassF1Score(NUM_CLASSES)])

    def validation_step(self, batch: list[Tensor]) -> None:
        inputs, labels = batch
        logits = self.model(inputs)
        self.scores.update(logits, labels)
        self.log_dict(self.scores)
        self.log("loss", functional.cross_entropy(logits, labels))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return TensorDataset(inputs, torch.randint(0, NUM_CLASSES, (NUM_SAMPLES,), generator=generator))


def main(devices: int) -> None:
    data = make_data()
    results = {}
    variants: dict[str, list[Callback]] = {"with": [ExactEvaluation()], "without": []}
    for name, callbacks in variants.items():
        trainer = Trainer(
            strategy=AccelFSDPStrategy(fsdp_version=2), devices=devices, callbacks=callbacks, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        [results[name]] = trainer.validate(Classifier(), DataLoader(data, batch_size=8), verbose=False)

    plain = Classifier().eval()
    with torch.no_grad():
        logits = plain.model(data.tensors[0])
    expected = {name: value.item() for name, value in plain.scores(logits, data.tensors[1]).items()}
    expected["loss"] = functional.cross_entropy(logits, data.tensors[1]).item()
    for name, value in expected.items():
        trainer.print(
            f"{name:20} one process {value:.7f}   {devices} processes {results['with'][name]:.7f}   "
            f"without ExactEvaluation {results['without'][name]:.7f}"
        )
        assert abs(results["with"][name] - value) < 1e-6 * abs(value), name  # sums in another order


if __name__ == "__main__":
    main(arguments.devices or torch.accelerator.device_count() or 3)
