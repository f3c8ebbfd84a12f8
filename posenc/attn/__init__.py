"""The machinery of attention: what a call is, who sees whom, which implementation serves it."""
