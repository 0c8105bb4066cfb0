"""The one error of this package that is the user's to mend."""


class GenerateError(ValueError):
    """Wrong options, prompts or models: the message names what came and what is accepted."""
