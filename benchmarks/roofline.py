"""How well fitted rooflines predict: times one model on this machine, fits, predicts other models, and times those too.

    python -m benchmarks.roofline --fit gpt2 --predict vit resnet50 vgg19

The fit is that of `ebbtide calibrate gpt2`. Errors are of the predicted against the measured step time, and of the ops
one by one: the sum of all their absolute errors against the sum of their times.
"""

from __future__ import annotations

import argparse
import math

from ebbtide.demo.workloads import WORKLOADS
from ebbtide.named_steps import observe_named, record_named_fake
from ebbtide.report.sentences import compute_lines
from ebbtide.roofline import with_durations
from ebbtide.run import allocator
from ebbtide.step import Step
from ebbtide.timed_steps import REPEATS, fit_here, matched


def main() -> None:
    """Print the fit, and one line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", default="gpt2", choices=list(WORKLOADS))
    parser.add_argument("--predict", nargs="+", default=["vit", "resnet50"], choices=list(WORKLOADS))
    arguments = parser.parse_args()
    allocator.set_tuned()  # page faults are no kernel's time
    fitted = fit_here([arguments.fit], lambda *_: None)
    print("\n".join(compute_lines(fitted.compute, fitted.seconds)))
    for name in (arguments.fit, *arguments.predict):
        measured, works = matched(observe_named(name, None, REPEATS), *record_named_fake(name))
        predicted = with_durations(measured, works, fitted.compute)
        error = predicted.plain_seconds / measured.plain_seconds - 1
        times = f"measured {measured.plain_seconds:.3f} s, predicted {predicted.plain_seconds:.3f} s ({error:+.1%})"
        print(f"{name}: {times}, ops off by {op_error(measured, predicted):.0%}")


def op_error(measured: Step, predicted: Step) -> float:
    """Sum of the ops' absolute errors over the sum of their measured times."""
    pairs = zip(measured.ops, predicted.ops, strict=True)
    return math.fsum(abs(a.duration_seconds - b.duration_seconds) for a, b in pairs) / measured.plain_seconds


if __name__ == "__main__":
    main()
