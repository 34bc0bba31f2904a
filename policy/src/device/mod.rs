//! Where tensors live: `--device auto | cpu | cuda:N`.
