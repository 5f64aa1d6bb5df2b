"""Builds, their plan, the workers that run the teacher, and stored alignments."""
