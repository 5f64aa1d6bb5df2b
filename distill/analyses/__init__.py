"""Analyses of trained runs, by name."""

# An analysis is one file in this folder and one line here; "package.module:Class" needs no line.
ANALYSES: dict[str, str] = {
    "compression": "distill.analyses.compression:Compression",
    "curvature": "distill.analyses.curvature:Curvature",
    "layers": "distill.analyses.layers:Layers",
    "map": "distill.analyses.map:Map",
    "margin": "distill.analyses.margin:Margin",
}
