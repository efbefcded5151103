"""Who feeds whom, decided at the seed from what relays report. Pure."""

from echo2.broadcast.director.director import Director
from echo2.broadcast.director.transfer import ObjectFacts

__all__ = ["Director", "ObjectFacts"]
