"""FlexAttention with the bias of a scheme inside its kernel."""
