"""`flashdraft plan`: what fits on a card and how fast it should be, without loading anything."""
