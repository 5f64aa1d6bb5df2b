"""TALAS (arXiv 2606.21851): top layers anchored to the teacher's vector, each layer aligned with the one above it.

    loss = tamd_weight * TAMD + lasd_weight * LASD + simcse_weight * SimCSE

With e_l the `(B, d_s)` pooled state of layer l (0 the embedding layer, L the last), t the teacher's vector,
W_l a projection `(d_s, d_T)`, and R_l the `(B, B)` cosines of the batch at layer l:

    TAMD   = mean over the K top layers of  mean_i (1 - cos(e_l,i W_l, t_i))       view 1
    LASD   = mean over pairs (l, l+1) of    (1 / B^2) ||R_{l+1} - R_l||_F^2         view 1
    SimCSE = `distill.objectives.simcse.info_nce` of the last layer, view 1 to view 2

The paper trains with sharpness-aware steps: `distill.sharpness`.

Differences between the paper, its code and this implementation:
- Pairs. The formula in the paper covers blocks only; the code also pairs the embedding layer with block 1. With [CLS]
  pooling that layer is the same for every text, so the pair would collapse block 1: it is left out for "cls"
  (`start_layer=1`) and kept for other poolings (0). Preset "official" is 0 throughout.
- The prose calls the upper layer of a pair the guide, but formula and code do not stop its gradient.
  `detach_guide=True` does.
- Repeated texts of a batch are negatives of each other in the code; here they are masked.
- The code allocates a head for every layer; here only anchored layers have one.
- The code computes under float16 autocast, whose rounding is as large as the differences R_{l+1} - R_l. Here
  everything is float32 without autocast (TF32 matrix products, if enabled, round like float16 again).

Under gradient accumulation LASD and SimCSE see one micro-batch at a time.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.objectives.base import Needs, Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets, unit
from distill.objectives.heads import linear_heads, make_heads
from distill.objectives.options import check_choice, check_count, check_weights
from distill.objectives.simcse import SimCSETerm

VIEWS = ("dropout", "pair")


class Talas(Objective):
    """Top layers anchored to the teacher's vector, each layer aligned with the one above it (TALAS, arXiv 2606.21851).

    The terms are "tamd", "lasd" and "simcse"; a term of weight 0 is neither computed nor returned and has no
    parameters.
    """

    needs = Needs(views=2)
    terms = ("tamd", "lasd", "simcse")
    second_view_terms = frozenset({"simcse"})
    presets: ClassVar[dict[str, dict[str, object]]] = {
        "paper": {},
        "official": {"start_layer": 0, "mask_duplicates": False},
    }

    def __init__(
        self,
        student: StudentShape,
        teacher: TeacherShape,
        *,
        anchored_layers: int = 2,
        start_layer: int | None = None,
        depth: int | None = None,
        detach_guide: bool = False,
        tamd_weight: float = 0.75,
        lasd_weight: float = 1.0,
        simcse_weight: float = 0.001,
        temperature: float = 0.1,
        mask_duplicates: bool = True,
        views: str = "dropout",
        head: str = "learned",
        head_init_std: float = 1e-3,
    ) -> None:
        """Create one bias-free head for each anchored layer.

        Args:
            anchored_layers: K, the number of top layers that TAMD anchors (k = K - 1 in the paper).
            start_layer: lower layer of the first pair of LASD; None is 1 for "cls", 0 otherwise.
            depth: number of pairs, from the top; None is all pairs from `start_layer` on.
            detach_guide: stop the gradient into the upper layer of a pair.
            temperature: of SimCSE.
            mask_duplicates: other rows of the same text are not negatives.
            views: view 2 is the same text with another dropout mask ("dropout"), or the second text of a record
                ("pair"). Teacher vectors and text ids are of the first text either way.
            head: "learned" projects each anchored layer into the teacher's space; "identity" anchors the states
                themselves (equal widths only); "auto" is "identity" for equal widths, else "learned".
            head_init_std: standard deviation of the heads' initial values.
        """
        super().__init__()
        check_weights({"tamd_weight": tamd_weight, "lasd_weight": lasd_weight, "simcse_weight": simcse_weight})
        check_choice("views", views, VIEWS)
        layers = student.layers
        if layers == 0 and (anchored_layers != 1 or lasd_weight):
            raise ConfigError(
                "objective talas anchors and aligns layers, and a static student has one state of a text; set "
                "anchored_layers=1 and lasd_weight=0, or use objective cosine"
            )
        check_count("anchored_layers", anchored_layers, 1, max(layers, 1), f"a student of {layers} layers")

        self.tamd_weight, self.lasd_weight, self.views = tamd_weight, lasd_weight, views
        self.simcse = SimCSETerm(simcse_weight, temperature, mask_duplicates)
        self.needs = Needs(views=self.simcse.views)
        self.first_anchored = layers - anchored_layers + 1
        self.detach_guide = detach_guide
        self.first_aligned = 0
        if lasd_weight:
            self.first_aligned = _first_aligned(student, start_layer, depth)
        self.heads = make_heads(anchored_layers if tamd_weight else 0, student, teacher, head, head_init_std)
        self.in_teacher_space = bool(tamd_weight) and self.projection() is None

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        """The weighted terms, float32 scalars, with or without autocast."""
        terms: dict[str, Tensor] = {}
        layers = student.view(0)
        with torch.autocast(layers.device.type, enabled=False):
            if self.tamd_weight:
                terms["tamd"] = self.tamd_weight * self._anchoring(layers, teacher.vectors.detach())
            if self.lasd_weight:
                terms["lasd"] = self.lasd_weight * self._alignment(layers)
            terms |= self.simcse(student, teacher)
        return terms

    def projection(self) -> Tensor | None:
        """`(d_T, d_s)` weight of the last layer's head; None if none is learned."""
        heads = list(self.heads.parameters())
        return heads[-1] if heads else None

    def linear_heads(self) -> dict[int, nn.Linear]:
        return linear_heads(self.heads, self.first_anchored)

    def _anchoring(self, layers: Tensor, target: Tensor) -> Tensor:
        projected = torch.stack(
            [head(state.float()) for state, head in zip(layers[self.first_anchored :], self.heads, strict=True)]
        )
        return (1 - (unit(projected) * unit(target)).sum(-1)).mean()

    def _alignment(self, layers: Tensor) -> Tensor:
        states = unit(layers[self.first_aligned :])
        grams = states @ states.mT
        guided, guide = grams[:-1], grams[1:]
        # All pairs have B * B entries: one mean over all entries is the mean over pairs of (1 / B^2) ||.||_F^2.
        return (guided - (guide.detach() if self.detach_guide else guide)).square().mean()


def _first_aligned(shape: StudentShape, start_layer: int | None, depth: int | None) -> int:
    layers = shape.layers
    if start_layer is None:
        start_layer = 1 if shape.pooling == "cls" else 0
        if start_layer == layers:
            raise ConfigError(
                "objective talas aligns pairs of blocks, and a cls-pooled student of 1 layer has none; set "
                "start_layer=0 or lasd_weight=0"
            )
    check_count("start_layer", start_layer, 0, layers - 1, f"a student of {layers} layers")
    if depth is None:
        return start_layer
    pairs = layers - start_layer
    check_count("depth", depth, 1, pairs, f"{pairs} pairs of layers from start_layer {start_layer} on")
    return layers - depth
