"""`flashdraft doctor`: a pair examined, and the causes of what is wrong with it."""
