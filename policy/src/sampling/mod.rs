//! Counter-based Gumbel noise and the distribution that a token is drawn from.
