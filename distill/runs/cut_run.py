"""The student of a run that is cut into its folder: `student.model` is `cut:MODEL,...`."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from distill.config import RunConfig
from distill.errors import StudentError
from distill.run_folder import CONFIG
from distill.runs.cut import cut_to
from distill.runs.cut_layers import CachedTexts
from distill.student.cut_spec import CutSpec, cut_folder, is_cut, trained_student
from distill.student.student import student_shape
from distill.training.method import build_objective, held_out_rows
from distill.training.targets import Targets
from teacher_cache.table.cache import TeacherCache


def cut_for_run(
    config: RunConfig, cache: TeacherCache, announce: Callable[[str], None] = lambda line: None
) -> RunConfig:
    """The configuration of a run with a student folder in place of a `cut:` model, which is cut if it was not before.

    The student is `OUTPUT_DIR/student/NAME`. A run that started, and so has its settings in its folder, keeps the one
    it has. Layers are chosen on texts that the run does not hold out.

    Raises:
        StudentError: as `cut`; or several processes would cut the student.
    """
    if not is_cut(config.student.model):
        return config
    spec, folder = CutSpec.parse(config.student.model), cut_folder(config.student, config.output_dir)
    started = (Path(config.output_dir) / CONFIG).is_file()
    if not (started and folder.exists()):
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise StudentError(
                f"{config.student.model} is cut by one process; run `distill cut` first, and set student.model to its "
                "folder"
            )
        targets = Targets(config, cache)
        objective = build_objective(config, student_shape(config.student), targets)
        skipped = targets.skipped_rows(objective)
        held_out = held_out_rows(config, cache.corpus(config.corpus), cache.rows, without=skipped)
        cached = CachedTexts.of(cache, targets.space, config.corpus, without=held_out)
        shutil.rmtree(folder, ignore_errors=True)
        source = replace(config.student, model=spec.model)
        result = cut_to(spec, source, folder, cached, cached.batches, score_before=False, announce=announce)
        layers, tokens = ",".join(map(str, result.layers)), result.after.vocabulary
        announce(f"cut: layers {layers} of {result.before.layers}, {tokens:,} of {result.before.vocabulary:,} tokens")
    return replace(config, student=trained_student(config.student, config.output_dir))
