//! librados and librbd, opened at run time (the C interfaces in Ceph's documentation: "Librados (C)", "librbd").
//! Everything else in this program is safe.
//!
//! An image's requests end on threads of librbd. Their memory is owned by the request until then.
#![allow(unsafe_code)]

use ferrite_helper::Done;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use ferrite_helper::Fault;

/// Handles of the libraries.
type Handle = *mut c_void;
type Ended = unsafe extern "C" fn(Handle, *mut c_void);

/// A client that watches an image, as librbd lists it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Watcher {
    address: *mut c_char,
    id: i64,
    cookie: u64,
}

/// A setting, as librbd lists it, with where its value is from: an index of [`LEVELS`].
#[repr(C)]
#[derive(Clone, Copy)]
struct Setting {
    name: *mut c_char,
    value: *mut c_char,
    source: c_int,
}

/// `rbd_config_source_t`, by the word of the command that changes it. The first one is the client's configuration.
const LEVELS: [Option<&str>; 3] = [None, Some("pool"), Some("image")];
/// Settings that are listed, at most: librbd 16 has 63.
const MAX_SETTINGS: usize = 1024;
const EXCLUSIVE: c_int = 0;
/// Zeros take space.
const THICK: c_int = 1;
/// Clients that are listed, at most.
const MAX_CLIENTS: usize = 64;
const ERANGE: i32 = 34;
const ENOENT: i32 = 2;

const TOO_OLD: &str = "install librbd1 of Ceph 16 or newer";
const MISSING: &str =
    "install librbd1 (Debian: apt install librbd1; RPM: librbd1), of Ceph 16 or newer";

/// Declares functions of the two libraries, and finds them.
macro_rules! functions {
    ($([$library:ident] $($name:ident($($argument:ty),*) -> $result:ty;)*)*) => {
        struct Functions {
            $($($name: unsafe extern "C" fn($($argument),*) -> $result,)*)*
        }

        impl Functions {
            fn find($($library: &Library),*) -> Result<Functions, Fault> {
                Ok(Functions {
                    $($($name: {
                        let found = $library.find(stringify!($name))?;
                        // SAFETY: the library's function of this name has this type, by its documentation.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) -> $result,
                            >(found)
                        }
                    },)*)*
                })
            }
        }
    };
}

functions! {
    [rados]
    rados_create2(*mut Handle, *const c_char, *const c_char, u64) -> c_int;
    rados_conf_read_file(Handle, *const c_char) -> c_int;
    rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
    rados_connect(Handle) -> c_int;
    rados_shutdown(Handle) -> ();
    rados_getaddrs(Handle, *mut *mut c_char) -> c_int;
    rados_buffer_free(*mut c_char) -> ();
    rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
    rados_ioctx_set_namespace(Handle, *const c_char) -> ();
    rados_ioctx_destroy(Handle) -> ();
    [rbd]
    rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_close(Handle) -> c_int;
    rbd_get_size(Handle, *mut u64) -> c_int;
    rbd_get_features(Handle, *mut u64) -> c_int;
    rbd_config_image_list(Handle, *mut Setting, *mut c_int) -> c_int;
    rbd_config_image_list_cleanup(*mut Setting, c_int) -> ();
    rbd_lock_acquire(Handle, c_int) -> c_int;
    rbd_lock_release(Handle) -> c_int;
    rbd_lock_break(Handle, c_int, *const c_char) -> c_int;
    rbd_lock_get_owners(Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd_lock_get_owners_cleanup(*mut *mut c_char, usize) -> ();
    rbd_watchers_list(Handle, *mut Watcher, *mut usize) -> c_int;
    rbd_watchers_list_cleanup(*mut Watcher, usize) -> ();
    rbd_aio_create_completion(*mut c_void, Ended, *mut Handle) -> c_int;
    rbd_aio_release(Handle) -> ();
    rbd_aio_get_return_value(Handle) -> isize;
    rbd_aio_read(Handle, u64, usize, *mut c_char, Handle) -> c_int;
    rbd_aio_write(Handle, u64, usize, *const c_char, Handle) -> c_int;
    rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
    rbd_aio_flush(Handle, Handle) -> c_int;
}

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// An open library. It is never closed: its threads run to the end of the process.
struct Library {
    name: &'static str,
    handle: *mut c_void,
}

impl Library {
    fn open(name: &'static CStr) -> Result<Library, Fault> {
        // SAFETY: the name is a string; initialisers of the library run, as for any program that links it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let shown = name.to_str().unwrap_or_default();
        if handle.is_null() {
            return Err(Fault::lasting(format!("{shown} cannot be loaded: {}", said()), MISSING));
        }
        Ok(Library { name: shown, handle })
    }

    fn find(&self, name: &str) -> Result<*mut c_void, Fault> {
        let text = CString::new(name).unwrap_or_default();
        // SAFETY: the library is open, and the name is a string.
        let found = unsafe { libc::dlsym(self.handle, text.as_ptr()) };
        match found.is_null() {
            true => {
                let why = format!("{} is too old: it lacks {name}", self.name);
                Err(Fault::lasting(why, TOO_OLD))
            }
            false => Ok(found),
        }
    }
}

/// The loader's text about its last failure.
fn said() -> String {
    // SAFETY: dlerror returns a string of the C library or null, which lives until this thread's next call of it.
    unsafe {
        match libc::dlerror() {
            said if said.is_null() => "it does not say why".into(),
            said => CStr::from_ptr(said).to_string_lossy().into_owned(),
        }
    }
}

/// Opens the libraries, once.
///
/// # Errors
/// They are not installed, or too old.
pub(crate) fn load() -> Result<(), Fault> {
    let rados = Library::open(c"librados.so.2")?;
    let rbd = Library::open(c"librbd.so.1")?;
    let functions = Functions::find(&rados, &rbd)?;
    let _ = FUNCTIONS.set(functions);
    Ok(())
}

fn api() -> &'static Functions {
    FUNCTIONS.get().expect("no handle is made before the libraries are open")
}

fn text(text: &str) -> CString {
    // Names with a null byte are refused by their parser.
    CString::new(text.replace('\0', "")).unwrap_or_default()
}

/// The result of a call: an error number, or what it says.
fn checked(result: c_int) -> Result<c_int, i32> {
    if result < 0 { Err(-result) } else { Ok(result) }
}

/// A client of a cluster.
pub(crate) struct Cluster(Handle);

// SAFETY: librados allows calls on a handle from all threads.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// A client of this name, not connected.
    pub(crate) fn new(client: &str) -> Result<Cluster, i32> {
        let mut handle = ptr::null_mut();
        let name = text(client);
        // SAFETY: the handle is filled in, and the names are strings.
        checked(unsafe { (api().rados_create2)(&mut handle, c"ceph".as_ptr(), name.as_ptr(), 0) })?;
        Ok(Cluster(handle))
    }

    pub(crate) fn read_conf(&self, file: &str) -> Result<(), i32> {
        let file = text(file);
        // SAFETY: the handle lives, and the name is a string.
        checked(unsafe { (api().rados_conf_read_file)(self.0, file.as_ptr()) }).map(drop)
    }

    pub(crate) fn set(&self, key: &str, value: &str) -> Result<(), i32> {
        let (key, value) = (text(key), text(value));
        // SAFETY: the handle lives, and both are strings.
        checked(unsafe { (api().rados_conf_set)(self.0, key.as_ptr(), value.as_ptr()) }).map(drop)
    }

    pub(crate) fn connect(&self) -> Result<(), i32> {
        // SAFETY: the handle lives.
        checked(unsafe { (api().rados_connect)(self.0) }).map(drop)
    }

    /// The addresses of this client, which no other has.
    pub(crate) fn addresses(&self) -> Result<String, i32> {
        let mut found = ptr::null_mut();
        // SAFETY: the handle lives; the string that is filled in is copied, and given back to the library.
        unsafe {
            checked((api().rados_getaddrs)(self.0, &mut found))?;
            let text = CStr::from_ptr(found).to_string_lossy().into_owned();
            (api().rados_buffer_free)(found);
            Ok(text)
        }
    }

    pub(crate) fn pool(&self, name: &str, namespace: &str) -> Result<Pool<'_>, i32> {
        let mut handle = ptr::null_mut();
        let (name, namespace) = (text(name), text(namespace));
        // SAFETY: the handle lives, the new one is filled in, and the names are strings.
        unsafe {
            checked((api().rados_ioctx_create)(self.0, name.as_ptr(), &mut handle))?;
            (api().rados_ioctx_set_namespace)(handle, namespace.as_ptr());
        }
        Ok(Pool { handle, _cluster: self })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: the handle lives, and it is not in use any more: pools borrow it.
        unsafe { (api().rados_shutdown)(self.0) }
    }
}

/// A pool, or a namespace in it.
pub(crate) struct Pool<'a> {
    handle: Handle,
    _cluster: &'a Cluster,
}

// SAFETY: librados allows calls on a handle from all threads.
unsafe impl Send for Pool<'_> {}
// SAFETY: as above.
unsafe impl Sync for Pool<'_> {}

impl Pool<'_> {
    /// Opens an image, or a snapshot of it.
    pub(crate) fn image(
        &self,
        name: &str,
        snapshot: Option<&str>,
        read_only: bool,
    ) -> Result<Image<'_>, i32> {
        let mut handle = ptr::null_mut();
        let (name, snapshot) = (text(name), snapshot.map(text));
        let snapshot = snapshot.as_ref().map_or(ptr::null(), |snapshot| snapshot.as_ptr());
        let open = if read_only { api().rbd_open_read_only } else { api().rbd_open };
        // SAFETY: the pool's handle lives, the new one is filled in, and the names are strings or null.
        checked(unsafe { open(self.handle, name.as_ptr(), &mut handle, snapshot) })?;
        Ok(Image { handle, _pool: self })
    }
}

impl Drop for Pool<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle lives, and it is not in use any more: images borrow it.
        unsafe { (api().rados_ioctx_destroy)(self.handle) }
    }
}

/// An open image.
pub(crate) struct Image<'a> {
    handle: Handle,
    _pool: &'a Pool<'a>,
}

// SAFETY: librbd allows calls on an image from all threads.
unsafe impl Send for Image<'_> {}
// SAFETY: as above.
unsafe impl Sync for Image<'_> {}

/// A request under way.
struct Pending {
    memory: Vec<u8>,
    done: Done,
}

impl Pending {
    fn end(self, result: isize) {
        let result = match result {
            ..0 => Err(i32::try_from(-result).unwrap_or(i32::MAX)),
            bytes => Ok(bytes as usize),
        };
        (self.done)(result, self.memory);
    }
}

/// Called by librbd on one of its threads, once for each request.
unsafe extern "C" fn ended(completion: Handle, pending: *mut c_void) {
    // SAFETY: librbd gives back the completion and the pointer that `begin` gave it, once. A panic ends the process.
    let (result, pending) = unsafe {
        let result = (api().rbd_aio_get_return_value)(completion);
        (api().rbd_aio_release)(completion);
        (result, Box::from_raw(pending.cast::<Pending>()))
    };
    pending.end(result);
}

impl Image<'_> {
    pub(crate) fn bytes(&self) -> Result<u64, i32> {
        let mut bytes = 0;
        // SAFETY: the image is open, and the number is filled in.
        checked(unsafe { (api().rbd_get_size)(self.handle, &mut bytes) })?;
        Ok(bytes)
    }

    pub(crate) fn features(&self) -> Result<u64, i32> {
        let mut features = 0;
        // SAFETY: the image is open, and the number is filled in.
        checked(unsafe { (api().rbd_get_features)(self.handle, &mut features) })?;
        Ok(features)
    }

    /// The value of one of librbd's settings for this image, and its command if it is not from the client's
    /// configuration: `image` or `pool`. `None`: this librbd does not have the setting.
    pub(crate) fn setting(&self, wanted: &str) -> Result<Option<(String, Option<&str>)>, i32> {
        let none = Setting { name: ptr::null_mut(), value: ptr::null_mut(), source: 0 };
        let (mut list, mut count) = (vec![none; MAX_SETTINGS], MAX_SETTINGS as c_int);
        // SAFETY: the image is open, the array has `count` places, and its strings are copied and given back.
        unsafe {
            checked((api().rbd_config_image_list)(self.handle, list.as_mut_ptr(), &mut count))?;
            let found = &list[..usize::try_from(count).unwrap_or(0).min(MAX_SETTINGS)];
            let found =
                found.iter().find(|it| CStr::from_ptr(it.name).to_bytes() == wanted.as_bytes());
            let found = found.map(|it| {
                let level = LEVELS.get(usize::try_from(it.source).unwrap_or(0)).copied().flatten();
                (CStr::from_ptr(it.value).to_string_lossy().into_owned(), level)
            });
            (api().rbd_config_image_list_cleanup)(list.as_mut_ptr(), count);
            Ok(found)
        }
    }

    /// Takes the exclusive lock, and keeps it until it is released.
    pub(crate) fn lock(&self) -> Result<(), i32> {
        // SAFETY: the image is open.
        checked(unsafe { (api().rbd_lock_acquire)(self.handle, EXCLUSIVE) }).map(drop)
    }

    pub(crate) fn unlock(&self) -> Result<(), i32> {
        // SAFETY: the image is open.
        checked(unsafe { (api().rbd_lock_release)(self.handle) }).map(drop)
    }

    /// Takes the lock from its owner, and shuts that client out of the cluster.
    pub(crate) fn break_lock(&self, owner: &str) -> Result<(), i32> {
        let owner = text(owner);
        // SAFETY: the image is open, and the owner is a string.
        checked(unsafe { (api().rbd_lock_break)(self.handle, EXCLUSIVE, owner.as_ptr()) }).map(drop)
    }

    /// The address of the client that has the lock.
    pub(crate) fn owner(&self) -> Result<Option<String>, i32> {
        let (mut owners, mut count, mut mode) = ([ptr::null_mut(); MAX_CLIENTS], MAX_CLIENTS, 0);
        // SAFETY: the image is open, the array has `count` places, and its strings are copied and given back.
        unsafe {
            let list = owners.as_mut_ptr();
            match (api().rbd_lock_get_owners)(self.handle, &mut mode, list, &mut count) {
                e if e == -ENOENT => return Ok(None),
                result => checked(result)?,
            };
            let first = owners[..count.min(MAX_CLIENTS)].first();
            let owner = first.map(|owner| CStr::from_ptr(*owner).to_string_lossy().into_owned());
            (api().rbd_lock_get_owners_cleanup)(list, count);
            Ok(owner)
        }
    }

    /// The addresses of the clients that have the image open for writing. One that has ended is among them for 30 s.
    pub(crate) fn watchers(&self) -> Result<Vec<String>, i32> {
        let none = Watcher { address: ptr::null_mut(), id: 0, cookie: 0 };
        let (mut list, mut count) = (vec![none; MAX_CLIENTS], MAX_CLIENTS);
        // SAFETY: the image is open, the array has `count` places, and its strings are copied and given back.
        unsafe {
            while match (api().rbd_watchers_list)(self.handle, list.as_mut_ptr(), &mut count) {
                e if e == -ERANGE && count <= 64 * MAX_CLIENTS => true,
                result => {
                    checked(result)?;
                    false
                }
            } {
                list.resize(count, none);
            }
            let found = &list[..count.min(list.len())];
            let address =
                |watcher: &Watcher| CStr::from_ptr(watcher.address).to_string_lossy().into_owned();
            let addresses = found.iter().map(address).collect();
            (api().rbd_watchers_list_cleanup)(list.as_mut_ptr(), count);
            Ok(addresses)
        }
    }

    /// Reads as many bytes as the memory has.
    pub(crate) fn read(&self, offset: u64, memory: Vec<u8>, done: Done) {
        self.begin(memory, done, |image, (at, len), completion| {
            // SAFETY: the memory belongs to the request until it ends.
            unsafe { (api().rbd_aio_read)(image, offset, len, at, completion) }
        });
    }

    pub(crate) fn write(&self, offset: u64, memory: Vec<u8>, done: Done) {
        self.begin(memory, done, |image, (at, len), completion| {
            // SAFETY: the memory belongs to the request until it ends.
            unsafe { (api().rbd_aio_write)(image, offset, len, at, completion) }
        });
    }

    pub(crate) fn discard(&self, offset: u64, len: u64, done: Done) {
        self.begin(Vec::new(), done, |image, _, completion| {
            // SAFETY: the image is open; no memory is used.
            unsafe { (api().rbd_aio_discard)(image, offset, len, completion) }
        });
    }

    /// `thick`: the zeros take space.
    pub(crate) fn zero(&self, offset: u64, len: usize, thick: bool, done: Done) {
        let flags = if thick { THICK } else { 0 };
        self.begin(Vec::new(), done, |image, _, completion| {
            // SAFETY: the image is open; no memory is used.
            unsafe { (api().rbd_aio_write_zeroes)(image, offset, len, completion, flags, 0) }
        });
    }

    pub(crate) fn flush(&self, done: Done) {
        self.begin(Vec::new(), done, |image, _, completion| {
            // SAFETY: the image is open; no memory is used.
            unsafe { (api().rbd_aio_flush)(image, completion) }
        });
    }

    fn begin(
        &self,
        mut memory: Vec<u8>,
        done: Done,
        submit: impl FnOnce(Handle, (*mut c_char, usize), Handle) -> c_int,
    ) {
        // The bytes stay where they are when the vector is moved.
        let place = (memory.as_mut_ptr().cast(), memory.len());
        let pending = Box::into_raw(Box::new(Pending { memory, done }));
        let mut completion = ptr::null_mut();
        // SAFETY: the pointer is that of a box. It is turned back once: by `ended`, or here if librbd has taken nothing.
        unsafe {
            let mut result =
                (api().rbd_aio_create_completion)(pending.cast(), ended, &mut completion);
            let is_made = result >= 0;
            if is_made {
                result = submit(self.handle, place, completion);
            }
            if result < 0 {
                if is_made {
                    (api().rbd_aio_release)(completion);
                }
                Box::from_raw(pending).end(result as isize);
            }
        }
    }
}

impl Drop for Image<'_> {
    fn drop(&mut self) {
        // SAFETY: the image is open, and it is not in use any more. librbd waits for requests under way.
        unsafe {
            (api().rbd_close)(self.handle);
        }
    }
}
