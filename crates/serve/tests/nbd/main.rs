//! Clients of NBD, of a served disk and of an export.

mod bytes;
mod clients;
mod contexts;
mod relay;
mod requests;
mod streams;
