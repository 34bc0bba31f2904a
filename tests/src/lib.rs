//! Cross-process tests of Rollcall.
