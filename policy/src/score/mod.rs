//! Log-probabilities of given tokens, and their gradients.
