//! A disk by vhost-user and by ublk.

mod ublk;
mod vhost;
mod vhost_hostile;
mod vhost_parked;
