"""Step times of tfpar beside its peers, all measured in one interleaved run: `python -m bench`."""
