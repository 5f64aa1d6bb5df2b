"""EMO: embedding distillation across tokenizers, by attention rows and token states of the important tokens.

    loss = alpha * InfoNCE + (1 - alpha) * (ira_weight * IRA + otis_weight * OTIS)

Teacher and student tokens of a text are mapped one to one (n pairs, see `teacher_cache.tokens.alignment`); the
importance of a teacher token is the attention that it receives in the teacher's last layer, score_j.

IRA, on the m = floor(n / 3) most important pairs: with X `(m, S)` and Y `(m, T)` their rows in the attention maps of a
pair of layers (mean over heads), both minus the mean of their rows,

    IRA = mean over layers and texts of 1 - |X'Y|_F / sqrt(|X'X|_F |Y'Y|_F)       1 - sqrt(CKA)

computed from the m x m kernels: |X'Y|_F^2 = <XX', YY'>. Student layer k of L_S is paired with teacher layer
floor(L_T / L_S) * k, for the z top k.

OTIS, on all tokens: with P the projection of teacher states into the student's width, the cost of moving mass from
student token i to teacher token j is C = 1 - softmax_j(h_i . P h_j / sqrt(d_s)), and

    OTIS = mean over texts of <G, C>,  G the entropic transport plan (Sinkhorn, in the log domain) between masses
    b_j = score_j / sum, and a_i = b of the token that i is mapped to, min b for those without one, over their sum.

Differences between the paper, the published codes and this implementation:
- "official" is the TALAS authors' port: z = 1; masses are softmaxes, of the scores and, for the student, once more
  of values within [0, 1], which makes them nearly equal; IRA is a sum over texts at a weight of 0.1, so that it
  grows with the batch; attention rows are truncated to the shorter of both texts; equal or nearest token strings are
  mapped. There a student token takes the mass of any teacher token whose nearest string it is; here of the one it
  is mapped to.
- The codes map strings ("mined_types"), so that a repeated word counts once; "offset" maps positions.
- Texts with m < 3 do not count. One centered row is 0, and two are always opposite, so CKA is meaningless for them;
  the codes add the constant 1 for m = 1.
- The codes run up to 100 Sinkhorn steps and test each for convergence; here the number is fixed. At epsilon = 0.1 a
  text's loss after 50 steps is within 1e-3 of its limit.
- In a causal teacher more rows attend to the first tokens. `mass="causal"` divides score_j by the rows that see j.
- Repeated texts of a batch are negatives of each other in the codes.
"""

import math
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.objectives.base import Needs, Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets, unit
from distill.objectives.options import check, check_choice, check_count, check_positive, check_weight
from distill.objectives.simcse import SimCSETerm

VIEWS = ("dropout", "pair")
# Methods of `teacher_cache.tokens.alignment` that map one to one.
ALIGNMENTS = ("offset", "mined_types", "mined_dp", "dtw_strict")
MASSES = ("paper", "official", "causal")
GRADIENTS = ("unrolled", "envelope")
REDUCTIONS = ("mean", "sum")
COLUMNS = ("all", "common")
COUNTED_FROM = ("bottom", "top")

T = TypeVar("T")

# Fewest centered rows for which CKA is meaningful.
MIN_ROWS = 3
# Log of zero mass; finite, because a difference of infinities is NaN.
LOG_ZERO = torch.finfo(torch.float32).min / 2


class EMO(Objective):
    """Attention rows and token states of important tokens, across two tokenizers (EMO, EMNLP 2025).

    The terms are "simcse", "ira" and "otis"; a term of weight 0 is neither computed nor returned and has no parameters.
    """

    needs = Needs(views=2, tokens=True, alignment="offset", importance=True)
    terms = ("simcse", "ira", "otis")
    second_view_terms = frozenset({"simcse"})
    presets: ClassVar[dict[str, dict[str, object]]] = {
        "paper": {},
        "official": {
            "attention_layers": 1,
            "alignment": "mined_types",
            "mass": "official",
            "ira_weight": 0.1,
            "ira_reduction": "sum",
            "attention_columns": "common",
            "iterations": 100,
            "mask_duplicates": False,
        },
    }

    def __init__(
        self,
        student: StudentShape,
        teacher: TeacherShape,
        *,
        alpha: float = 0.5,
        ira_weight: float = 1.0,
        otis_weight: float = 1.0,
        alignment: str = "offset",
        attention_layers: int = 2,
        counted_from: str = "bottom",
        divisor: int = 3,
        ira_reduction: str = "mean",
        attention_columns: str = "all",
        mass: str = "paper",
        epsilon: float = 0.1,
        iterations: int = 50,
        gradient: str = "unrolled",
        temperature: float = 0.05,
        mask_duplicates: bool = True,
        views: str = "dropout",
    ) -> None:
        """Create P.

        Args:
            alpha: weight of InfoNCE, from 0 to 1.
            alignment: method that maps tokens one to one.
            attention_layers: z, the number of top student layers that IRA compares.
            counted_from: "bottom" pairs layer k with floor(L_T / L_S) * k; "top" pairs the last layers and
                goes down in steps of floor(L_T / L_S).
            divisor: m is floor(n / divisor); 1 compares all pairs.
            ira_reduction: "mean" or "sum" over layers and texts.
            attention_columns: "common" truncates attention rows to the tokens of the shorter text.
            mass: of tokens: "paper", "official" or "causal", see the module.
            epsilon: weight of the entropic term; costs lie within [0, 1].
            iterations: Sinkhorn steps.
            gradient: "unrolled" backpropagates through all steps; "envelope" treats the plan as a constant, which is
                much cheaper.
            temperature: of InfoNCE.
            mask_duplicates: other rows of the same text are not negatives.
            views: view 2 is another dropout mask ("dropout") or the second text of a record ("pair").
        """
        super().__init__()
        check("alpha", alpha, "a number from 0 to 1", isinstance(alpha, int | float) and 0 <= alpha <= 1)
        check_weight("ira_weight", ira_weight)
        check_weight("otis_weight", otis_weight)
        check_choice("alignment", alignment, ALIGNMENTS)
        check_count("attention_layers", attention_layers, 1, student.layers, f"a student of {student.layers} layers")
        check_choice("counted_from", counted_from, COUNTED_FROM)
        check_count("divisor", divisor, 1, None)
        check_choice("ira_reduction", ira_reduction, REDUCTIONS)
        check_choice("attention_columns", attention_columns, COLUMNS)
        check_choice("mass", mass, MASSES)
        check_positive("epsilon", epsilon)
        check_count("iterations", iterations, 1, None)
        check_choice("gradient", gradient, GRADIENTS)
        check_choice("views", views, VIEWS)
        fits = mass != "causal" or teacher.causal is not False
        check("mass", mass, "'paper' or 'official' for a teacher that is not causal", fits)

        self.simcse = SimCSETerm(float(alpha), temperature, mask_duplicates)
        self.ira_weight, self.otis_weight = (1 - alpha) * ira_weight, (1 - alpha) * otis_weight
        weights = {"alpha": alpha, "ira_weight": ira_weight, "otis_weight": otis_weight}
        check(
            "alpha, *_weight", weights, "at least one term above 0", bool(alpha or self.ira_weight or self.otis_weight)
        )
        self.divisor, self.ira_reduction, self.attention_columns = divisor, ira_reduction, attention_columns
        self.mass, self.epsilon, self.iterations, self.gradient = mass, float(epsilon), iterations, gradient
        self.views = views

        by_token = bool(self.ira_weight or self.otis_weight)
        pairs: tuple[tuple[int, int], ...] = ()
        self.to_student: nn.Linear | None = None
        if by_token:
            layers, width = _teacher_sizes(student, teacher, attention_layers)
            if self.ira_weight:
                pairs = layer_pairs(student.layers, layers, attention_layers, counted_from)
            if self.otis_weight:
                self.to_student = nn.Linear(width, student.dim, bias=False)
        # Attention maps do not depend on the values of the last compared block, nor on later blocks.
        self.has_unused_parameters = not self.simcse.weight and not self.otis_weight
        self.needs = Needs(
            views=self.simcse.views,
            tokens=by_token,
            alignment=alignment if by_token else None,
            attention=pairs,
            importance=by_token,
        )

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The weighted terms, float32 scalars, with or without autocast."""
        terms: dict[str, Tensor] = {}
        with torch.autocast(student.layers.device.type, enabled=False):
            if self.ira_weight:
                terms["ira"] = self.ira_weight * self._attention(student, teacher)
            if self.otis_weight:
                terms["otis"] = self.otis_weight * self._transport(student, teacher)
            terms |= self.simcse(student, teacher)
        return terms

    def _attention(self, student: StudentOutput, teacher: TeacherTargets) -> Tensor:
        mine, theirs = _given(student.tokens, "student token states"), _given(teacher.tokens, "teacher token states")
        maps = _given(mine.attention, "student attention maps").float()
        targets = _given(theirs.attention, "teacher attention maps").detach().float()
        # (B, n_s): whether a student token has a counterpart, and its index.
        weights, partners = _given(teacher.alignment, "alignment").max(-1)
        mapped = weights > 0
        scores = self._scores(teacher).gather(1, partners).masked_fill(~mapped, -math.inf)
        rows = mapped.sum(1) // self.divisor
        most = min(mine.mask.shape[1], theirs.mask.shape[1]) // self.divisor
        student_rows = scores.topk(most).indices
        teacher_rows = partners.gather(1, student_rows)
        if self.attention_columns == "common":
            shorter = torch.minimum(mine.mask.sum(1), theirs.mask.sum(1))[:, None]
            maps = maps * _first(mine.mask, shorter)[:, None]
            targets = targets * _first(theirs.mask, shorter)[:, None]
        chosen = torch.arange(most, device=rows.device) < rows[:, None]
        distance = 1 - root_cka(_rows(maps, student_rows), _rows(targets, teacher_rows), chosen)
        counted = rows >= MIN_ROWS
        total = (distance * counted).sum()
        return total if self.ira_reduction == "sum" else total / (len(maps) * counted.sum().clamp(min=1))

    def _transport(self, student: StudentOutput, teacher: TeacherTargets) -> Tensor:
        mine, theirs = _given(student.tokens, "student token states"), _given(teacher.tokens, "teacher token states")
        states = mine.states.float()
        projected = _given(self.to_student, "projection")(theirs.states.detach().float())
        similarity = states @ projected.mT / math.sqrt(states.shape[-1])
        # Not -inf, which would be NaN for a text without tokens.
        cost = 1 - similarity.masked_fill(~theirs.mask[:, None], LOG_ZERO).softmax(-1)
        alignment = _given(teacher.alignment, "alignment").float()
        teacher_mass, student_mass = masses(
            self._scores(teacher), theirs.mask, alignment, mine.mask, twice_softmax=self.mass == "official"
        )
        with torch.set_grad_enabled(self.gradient == "unrolled" and torch.is_grad_enabled()):
            plan = sinkhorn(cost, student_mass, teacher_mass, epsilon=self.epsilon, iterations=self.iterations)
        return (plan * cost).sum((1, 2)).mean()

    def _scores(self, teacher: TeacherTargets) -> Tensor:
        """`(B, n_T)` attention that each teacher token receives; under "causal" per row that sees it."""
        theirs = _given(teacher.tokens, "teacher token states")
        scores = _given(theirs.importance, "importance of teacher tokens").detach().float()
        if self.mass != "causal":
            return scores
        seen_by = theirs.mask.sum(1, keepdim=True) - theirs.mask.cumsum(1) + 1
        return scores / seen_by


def layer_pairs(student: int, teacher: int, count: int, counted_from: str) -> tuple[tuple[int, int], ...]:
    """(student layer, teacher layer) of the `count` top student layers, counted from 1, ascending."""
    step = teacher // student
    if step == 0:
        raise ConfigError(
            f"objective emo pairs every student layer with another teacher layer, but the teacher has {teacher} layers "
            f"and the student {student}; use a student with fewer layers, or set ira_weight=0"
        )
    last = teacher if counted_from == "top" else step * student
    return tuple((layer, last - step * (student - layer)) for layer in range(student - count + 1, student + 1))


def root_cka(first: Tensor, second: Tensor, chosen: Tensor) -> Tensor:
    """`(z, B)` square roots of linear CKA, within [0, 1]; 0 without variation.

    Args:
        first, second: `(z, B, m, S)` and `(z, B, m, T)` float32, rows in the same order.
        chosen: `(B, m)` bool, the rows that count.
    """
    count = chosen.sum(1).clamp(min=1)[:, None, None]
    kernels = []
    for rows in (first, second):
        rows = rows * chosen[..., None]
        rows = (rows - rows.sum(2, keepdim=True) / count) * chosen[..., None]
        kernels.append(unit((rows @ rows.mT).flatten(2), eps=1e-30))
    # Clamped, because the slope of the root is infinite at 0.
    return (kernels[0] * kernels[1]).sum(-1).clamp(min=1e-8).sqrt()


def masses(
    scores: Tensor, teacher_mask: Tensor, alignment: Tensor, student_mask: Tensor, *, twice_softmax: bool = False
) -> tuple[Tensor, Tensor]:
    """`(B, n_T)` and `(B, n_s)` masses of teacher and student tokens; they sum to 1 per text, padding is 0.

    Args:
        scores: `(B, n_T)` float32, >= 0.
        alignment: `(B, n_s, n_T)` float32, one to one.
        twice_softmax: softmax instead of division by the sum, as in the published code.
    """

    def shares(values: Tensor, mask: Tensor) -> Tensor:
        if twice_softmax:
            return values.masked_fill(~mask, LOG_ZERO).softmax(1) * mask
        values = values * mask
        return values / values.sum(1, keepdim=True).clamp(min=1e-30)

    teacher = shares(scores, teacher_mask)
    least = teacher.masked_fill(~teacher_mask, math.inf).amin(1, keepdim=True)
    taken = (alignment @ teacher[..., None])[..., 0]
    student = torch.where(alignment.sum(-1) > 0, taken, torch.where(least.isfinite(), least, 0))
    return teacher, shares(student, student_mask)


def sinkhorn(cost: Tensor, rows: Tensor, columns: Tensor, *, epsilon: float, iterations: int) -> Tensor:
    """`(B, n, m)` entropic transport plans; row sums are exact, column sums approximate.

    Args:
        cost: `(B, n, m)` float32.
        rows, columns: `(B, n)` and `(B, m)` masses of equal sums; entries of 0 are ignored.
        epsilon: > 0, weight of the entropy.
    """
    has_row_mass, has_column_mass = rows > 0, columns > 0
    kernel = (-cost / epsilon).masked_fill(~(has_row_mass[:, :, None] & has_column_mass[:, None]), LOG_ZERO)
    row_mass, column_mass = (mass.clamp(min=torch.finfo(mass.dtype).tiny).log() for mass in (rows, columns))
    left = torch.zeros_like(row_mass)
    right = torch.zeros_like(column_mass)
    for _ in range(iterations):
        right = (column_mass - torch.logsumexp(kernel + left[:, :, None], 1)).masked_fill(~has_column_mass, 0)
        left = (row_mass - torch.logsumexp(kernel + right[:, None], 2)).masked_fill(~has_row_mass, 0)
    return (kernel + left[:, :, None] + right[:, None]).exp()


def _rows(maps: Tensor, indices: Tensor) -> Tensor:
    """`(z, B, m, n)`: rows `indices` `(B, m)` of maps `(z, B, n, n)`."""
    layers, _, _, width = maps.shape
    return maps.gather(2, indices[None, :, :, None].expand(layers, -1, -1, width))


def _first(mask: Tensor, count: Tensor) -> Tensor:
    """`(B, n)` bool: the first `count` `(B, 1)` tokens of each text."""
    return mask & (mask.cumsum(1) <= count)


def _teacher_sizes(student: StudentShape, teacher: TeacherShape, count: int) -> tuple[int, int]:
    """Layers of the teacher and width of its token states."""
    if teacher.layers is not None and teacher.token_dim is not None:
        return teacher.layers, teacher.token_dim
    top = range(student.layers - count + 1, student.layers + 1)
    example = "" if teacher.layers is not None else " for a teacher of 12 layers"
    layers = ",".join(str((teacher.layers or 12) // student.layers * layer) for layer in top)
    raise ConfigError(
        "objective emo compares tokens and attention maps, but the cache holds only sentence vectors of the teacher; "
        f"add them: `tcache build --columns vectors,tokens,attention --attention-layers {layers}`{example}"
    )


def _given(value: T | None, what: str) -> T:
    if value is None:
        raise ConfigError(f"objective emo was given no {what}")
    return value
