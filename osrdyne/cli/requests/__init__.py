"""Commands about single requests: send one, explain one, show those that no worker finished."""
