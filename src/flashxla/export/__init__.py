"""The command `flashxla export`: a model's step as programs that run without Python."""
