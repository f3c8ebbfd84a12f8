"""An ablation in twenty lines: train short, test long, and read the verdict.

20 steps say little; the same as a command: ``posenc compare --schemes alibi rope rope+alibi``.
"""

import tempfile

from posenc.study import Study, run_study, write_results

if __name__ == "__main__":  # worker processes import this file
    with tempfile.TemporaryDirectory() as out:
        study = Study(
            schemes=("alibi", "rope", "rope+alibi"),
            train_len=32, eval_lens=(32, 128), steps=20, layers=1, seeds=1, out=out,
        )  # fmt: skip
        records = list(run_study(study, study.corpus()))
        for record in records:
            loss = record["loss"]
            print(f"{record['scheme']:12}", *(f"{n}: {loss[n]:.3f}" for n in sorted(loss, key=int)))
        print(write_results(study, records))
