"""`flashxla doctor`: what is installed and works, with a live proof that a cache write is in place."""
