"""transformers' own command line with flashxla's attention enabled.

python -m flashxla.transformers serve --attn-implementation flashxla/attention
"""

from transformers.cli.transformers import main

from flashxla import transformers

transformers.enable()
main()
