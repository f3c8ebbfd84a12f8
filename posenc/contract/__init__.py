"""What a scheme is: its interface, the facts and fields that it declares, its params, tokens."""
