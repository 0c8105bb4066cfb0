"""`flashxla bench vllm`: the engine's speed as its users meet it, beside what the machine allows."""
