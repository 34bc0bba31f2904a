//! Chat templates, token streams and tool-call parsing.
