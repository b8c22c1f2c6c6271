//! The requests that name a node, in a transaction or outside of one.

use super::connection::Connection;
use super::error::{Broken, StoreError, What};
use super::wire::{
    self, ABSOLUTE_PATH_MAX, MessageType, Permission, RELATIVE_PATH_MAX, nul_terminated,
};

/// Bytes of children's names that are accepted of one node.
const LIST_BYTES_MAX: usize = 1 << 20;
/// How often a list is begun again that changed while it was read in parts.
const LIST_ATTEMPTS: u32 = 16;

/// A connection and the transaction its requests are in, if any.
pub(super) struct Session<'a> {
    pub(super) connection: &'a mut Connection,
    pub(super) transaction_id: u32,
}

impl Session<'_> {
    fn request(
        &mut self,
        verb: &'static str,
        path: &str,
        kind: MessageType,
        payload: &[u8],
    ) -> Result<Vec<u8>, StoreError> {
        self.connection.request(What { verb, path }, kind, self.transaction_id, payload)
    }

    pub(super) fn read(&mut self, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        check_path(What { verb: "read", path })?;
        none_if_missing(self.request("read", path, MessageType::Read, &nul_terminated(&[path])))
    }

    pub(super) fn read_string(&mut self, path: &str) -> Result<Option<String>, StoreError> {
        let Some(value) = self.read(path)? else { return Ok(None) };
        let what = What { verb: "read", path };
        match String::from_utf8(value) {
            Ok(s) if s.contains('\0') => Err(StoreError::invalid(what, "the value has a NUL")),
            Ok(s) => Ok(Some(s)),
            Err(_) => Err(StoreError::invalid(what, "the value is not UTF-8 text")),
        }
    }

    pub(super) fn write(&mut self, path: &str, value: &[u8]) -> Result<(), StoreError> {
        check_path(What { verb: "write", path })?;
        let mut payload = nul_terminated(&[path]);
        payload.extend_from_slice(value);
        self.request("write", path, MessageType::Write, &payload).map(drop)
    }

    pub(super) fn remove(&mut self, path: &str) -> Result<(), StoreError> {
        check_path(What { verb: "remove", path })?;
        let reply = self.request("remove", path, MessageType::Rm, &nul_terminated(&[path]));
        none_if_missing(reply).map(drop)
    }

    pub(super) fn mkdir(&mut self, path: &str) -> Result<(), StoreError> {
        check_path(What { verb: "make", path })?;
        self.request("make", path, MessageType::Mkdir, &nul_terminated(&[path])).map(drop)
    }

    pub(super) fn list(&mut self, path: &str) -> Result<Vec<String>, StoreError> {
        check_path(What { verb: "list", path })?;
        let reply = self.request("list", path, MessageType::Directory, &nul_terminated(&[path]));
        match reply {
            // More children than fit in one reply.
            Err(StoreError::Refused { name, .. }) if name == "E2BIG" => self.list_in_parts(path),
            other => self.names(path, &other?),
        }
    }

    fn list_in_parts(&mut self, path: &str) -> Result<Vec<String>, StoreError> {
        let what = What { verb: "list", path };
        for _ in 0..LIST_ATTEMPTS {
            let mut names = Vec::new();
            let mut generation: Option<String> = None;
            // The list ends with one NUL more; names are never empty.
            while names != b"\0" && !names.ends_with(b"\0\0") {
                let payload = nul_terminated(&[path, &names.len().to_string()]);
                let reply = self.request("list", path, MessageType::DirectoryPart, &payload)?;
                let (now, part) =
                    wire::split_string(&reply)
                        .filter(|(_, part)| !part.is_empty())
                        .ok_or_else(|| self.broken(what, "a part of a list without names"))?;
                if generation.get_or_insert_with(|| now.to_owned()) != now {
                    names.clear();
                    break;
                }
                names.extend_from_slice(part);
                if names.len() > LIST_BYTES_MAX {
                    return Err(StoreError::invalid(what, "the node has too many children"));
                }
            }
            if names.pop().is_some() {
                return self.names(path, &names);
            }
        }
        Err(StoreError::invalid(what, "its children changed each time they were listed"))
    }

    fn names(&mut self, path: &str, payload: &[u8]) -> Result<Vec<String>, StoreError> {
        match wire::strings(payload) {
            Some(names) => Ok(names.into_iter().map(str::to_owned).collect()),
            None => Err(self.broken(What { verb: "list", path }, "a list that is not of names")),
        }
    }

    pub(super) fn get_permissions(&mut self, path: &str) -> Result<Vec<Permission>, StoreError> {
        let what = What { verb: "get permissions of", path };
        check_path(what)?;
        let reply = self.request(what.verb, path, MessageType::GetPerms, &nul_terminated(&[path]));
        wire::decode_permissions(&reply?)
            .ok_or_else(|| self.broken(what, "permissions that are none"))
    }

    pub(super) fn set_permissions(
        &mut self,
        path: &str,
        permissions: &[Permission],
    ) -> Result<(), StoreError> {
        let what = What { verb: "set permissions of", path };
        check_path(what)?;
        let list = wire::encode_permissions(permissions)
            .filter(|list| !list.is_empty())
            .ok_or_else(|| StoreError::invalid(what, "permissions are a list of n, r, w or b"))?;
        let mut payload = nul_terminated(&[path]);
        payload.extend_from_slice(&list);
        self.request(what.verb, path, MessageType::SetPerms, &payload).map(drop)
    }

    fn broken(&mut self, what: What<'_>, why: &str) -> StoreError {
        self.connection.give_up(Broken::Protocol(why.to_owned())).at(what)
    }
}

/// A transaction in progress: what it reads does not change under it, and what it writes is seen
/// by others as a whole or not at all. See [`Store::transaction`](super::Store::transaction).
pub struct Transaction<'a> {
    session: Session<'a>,
    is_open: bool,
}

impl<'a> Transaction<'a> {
    pub(super) fn start(connection: &'a mut Connection) -> Result<Self, StoreError> {
        let what = What { verb: "start a transaction", path: "" };
        let kind = MessageType::TransactionStart;
        let reply = connection.request(what, kind, wire::NO_TRANSACTION, b"\0")?;
        let id = wire::split_string(&reply)
            .and_then(|(id, _)| id.parse().ok())
            .filter(|id| *id != wire::NO_TRANSACTION);
        match id {
            Some(transaction_id) => {
                Ok(Transaction { session: Session { connection, transaction_id }, is_open: true })
            }
            None => {
                let why = Broken::Protocol("a transaction without a number".to_owned());
                Err(connection.give_up(why).at(what))
            }
        }
    }

    pub(super) fn commit(mut self) -> Result<(), StoreError> {
        self.is_open = false;
        let end = MessageType::TransactionEnd;
        self.session.request("commit a transaction", "", end, b"T\0").map(drop)
    }

    /// The node's value; `None` if there is no such node.
    ///
    /// # Errors
    /// Any [`StoreError`], as for all requests.
    pub fn read(&mut self, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.session.read(path)
    }

    /// The node's value as text; `None` if there is no such node.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if it is not UTF-8 or has a NUL.
    pub fn read_string(&mut self, path: &str) -> Result<Option<String>, StoreError> {
        self.session.read_string(path)
    }

    /// Sets the node's value, and makes it and its parents where they are missing.
    ///
    /// # Errors
    /// Any [`StoreError`].
    pub fn write(&mut self, path: &str, value: &[u8]) -> Result<(), StoreError> {
        self.session.write(path, value)
    }

    /// Removes the node and all below it; one that is not there is removed already.
    ///
    /// # Errors
    /// Any [`StoreError`].
    pub fn remove(&mut self, path: &str) -> Result<(), StoreError> {
        self.session.remove(path)
    }

    /// Makes the node, and its parents, where they are missing.
    ///
    /// # Errors
    /// Any [`StoreError`].
    pub fn mkdir(&mut self, path: &str) -> Result<(), StoreError> {
        self.session.mkdir(path)
    }

    /// The names of the node's children.
    ///
    /// # Errors
    /// [`StoreError::NotFound`] if there is no such node.
    pub fn list(&mut self, path: &str) -> Result<Vec<String>, StoreError> {
        self.session.list(path)
    }

    /// See [`Store::set_permissions`](super::Store::set_permissions).
    ///
    /// # Errors
    /// [`StoreError::NotFound`] if there is no such node.
    pub fn set_permissions(
        &mut self,
        path: &str,
        permissions: &[Permission],
    ) -> Result<(), StoreError> {
        self.session.set_permissions(path, permissions)
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if self.is_open {
            let what = What { verb: "abandon a transaction", path: "" };
            let Session { connection, transaction_id } = &mut self.session;
            connection.send_and_forget(what, MessageType::TransactionEnd, *transaction_id, b"F\0");
        }
    }
}

/// The limits of the protocol; which characters a server accepts is left to it.
pub(super) fn check_path(what: What<'_>) -> Result<(), StoreError> {
    let path = what.path;
    let limit = if path.starts_with('/') { ABSOLUTE_PATH_MAX } else { RELATIVE_PATH_MAX };
    if path.is_empty() {
        Err(StoreError::invalid(what, "the path is empty"))
    } else if path.len() > limit {
        Err(StoreError::invalid(what, "the path is longer than xenstore allows"))
    } else if path.contains('\0') {
        Err(StoreError::invalid(what, "the path has a NUL"))
    } else {
        Ok(())
    }
}

fn none_if_missing(reply: Result<Vec<u8>, StoreError>) -> Result<Option<Vec<u8>>, StoreError> {
    match reply {
        Ok(value) => Ok(Some(value)),
        Err(StoreError::NotFound { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}
