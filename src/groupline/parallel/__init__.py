"""Several processes that train one model: who they are, what they add up, how the model is shared out, who is missing."""
