//! The functions of MPI that are used, in the three binary dialects of its libraries.

use std::ffi::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::os::unix::Library;

use crate::launcher::Family;
use crate::{Error, Result};

/// A handle: an address or a small number in the standard and in Open MPI's dialect. In MPICH's it
/// is an `int`, which is passed in the low half of the register and stored in the low half of the
/// word, because the supported machines are little-endian.
pub(super) type Handle = usize;

/// The handler of a signal in this process.
fn handler_of(signal: c_int) -> libc::sighandler_t {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the action is only read into; one of all zeros is the default handler.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init().sa_sigaction
    }
}

/// Takes SIGUSR1 from MPICH, which asks its launcher for the dead ranks when a launcher sends the
/// signal at the death of one. The lifeline has noticed that death by then, and a launcher whose
/// answer finds that this rank has ended, too, fails and kills all other ranks before they report.
/// `before` is the handler from before MPI's; where it is the default one, which would end this
/// process, the signal is ignored.
fn ignore_deaths(before: libc::sighandler_t) {
    let handler = if before == libc::SIG_DFL {
        libc::SIG_IGN
    } else {
        before
    };
    // SAFETY: the handler is one that this process had before.
    unsafe { libc::signal(libc::SIGUSR1, handler) };
}

/// A status of any dialect: the largest has 32 bytes.
#[repr(C, align(8))]
pub(super) struct Status([u8; 64]);

impl Status {
    pub fn new() -> Self {
        Status([0; 64])
    }
}

/// The constants of a dialect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dialect {
    pub name: &'static str,
    world: Handle,
    byte: Handle,
    errors_return: Handle,
    funneled: c_int,
}

/// `libmpi_abi`: the interface that MPI 5.0 standardises (chapter 20 of the standard).
const STANDARD: Dialect = Dialect {
    name: "standard ABI",
    world: 0x101,
    byte: 0x247,
    errors_return: 0x143,
    funneled: 1024,
};

/// MPICH's own interface, which Intel MPI, MVAPICH and Cray MPICH share.
const MPICH: Dialect = Dialect {
    name: "MPICH ABI",
    world: 0x4400_0000,
    byte: 0x4c00_010d,
    errors_return: 0x5400_0001,
    funneled: 1,
};

type Plain = unsafe extern "C" fn() -> c_int;
type InitThread =
    unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int;
type OfComm = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
type SetHandler = unsafe extern "C" fn(Handle, Handle) -> c_int;
type Send_ =
    unsafe extern "C" fn(*const c_void, c_int, Handle, c_int, c_int, Handle, *mut Handle) -> c_int;
type Receive =
    unsafe extern "C" fn(*mut c_void, c_int, Handle, c_int, c_int, Handle, *mut Handle) -> c_int;
type Test = unsafe extern "C" fn(*mut Handle, *mut c_int, *mut Status) -> c_int;
type GetCount = unsafe extern "C" fn(*const Status, Handle, *mut c_int) -> c_int;
type Text = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;
type ErrorText = unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int;

/// The functions of an open library.
#[derive(Clone)]
pub(super) struct Calls {
    pub dialect: Dialect,
    pub file: PathBuf,
    init_thread: InitThread,
    initialized: OfFlag,
    finalize: Plain,
    comm_rank: OfComm,
    comm_size: OfComm,
    set_handler: SetHandler,
    isend: Send_,
    irecv: Receive,
    test: Test,
    get_count: GetCount,
    version: Text,
    error_string: ErrorText,
}

type OfFlag = unsafe extern "C" fn(*mut c_int) -> c_int;

impl Calls {
    /// Binds the functions of a library.
    ///
    /// # Errors
    /// If one is missing: then the file is no MPI library, or one of an unknown dialect.
    pub fn bind(library: &'static Library, file: &Path) -> Result<Calls> {
        fn function<F: Copy>(library: &Library, file: &Path, name: &str) -> Result<F> {
            // SAFETY: the types above are those of the standard's C interface, in which handles
            // are at most a register wide in every dialect.
            let found = unsafe { library.get::<F>(name.as_bytes()) };
            found.map(|symbol| *symbol).map_err(|_| {
                Error::Join(format!(
                    "{} is not an MPI library that can be used: it has no function {name}; name \
                     another file in SLABWISE_LIBMPI",
                    file.display()
                ))
            })
        }
        let open_mpi = |name: &str| {
            // SAFETY: these symbols are variables, of which only the address is taken.
            let symbol = unsafe { library.get::<*const c_void>(name.as_bytes()) };
            symbol.ok().map(|symbol| symbol.into_raw() as Handle)
        };
        let file_name = file.file_name().unwrap_or_default().to_string_lossy();
        let is_standard = open_mpi("MPI_Abi_get_version").is_some() && file_name.contains("abi");
        let open_mpi = (
            open_mpi("ompi_mpi_comm_world"),
            open_mpi("ompi_mpi_byte"),
            open_mpi("ompi_mpi_errors_return"),
        );
        let dialect = match open_mpi {
            _ if is_standard => STANDARD,
            (Some(world), Some(byte), Some(errors_return)) => Dialect {
                name: "Open MPI ABI",
                world,
                byte,
                errors_return,
                funneled: 1,
            },
            _ => MPICH,
        };
        Ok(Calls {
            dialect,
            file: file.to_path_buf(),
            init_thread: function(library, file, "MPI_Init_thread")?,
            initialized: function(library, file, "MPI_Initialized")?,
            finalize: function(library, file, "MPI_Finalize")?,
            comm_rank: function(library, file, "MPI_Comm_rank")?,
            comm_size: function(library, file, "MPI_Comm_size")?,
            set_handler: function(library, file, "MPI_Comm_set_errhandler")?,
            isend: function(library, file, "MPI_Isend")?,
            irecv: function(library, file, "MPI_Irecv")?,
            test: function(library, file, "MPI_Test")?,
            get_count: function(library, file, "MPI_Get_count")?,
            version: function(library, file, "MPI_Get_library_version")?,
            error_string: function(library, file, "MPI_Error_string")?,
        })
    }

    /// The launchers whose processes the library can connect. The standard's interface is that of
    /// several libraries, which their versions tell apart.
    pub fn family(&self) -> Family {
        if self.version().contains("Open MPI") {
            Family::OpenMpi
        } else {
            Family::Mpich
        }
    }

    /// The first line of the library's version. May be called before `init`.
    pub fn version(&self) -> String {
        // Twice the most that any library needs.
        let mut text = vec![0_u8; 2 * 8192];
        let mut len = 0;
        // SAFETY: the buffer is longer than MPI_MAX_LIBRARY_VERSION_STRING of every dialect.
        unsafe { (self.version)(text.as_mut_ptr().cast(), &mut len) };
        let text = String::from_utf8_lossy(&text[..(len.max(0) as usize).min(text.len())]);
        let first = text
            .trim_end_matches('\0')
            .lines()
            .next()
            .unwrap_or_default();
        let first = first.split(", ident").next().unwrap_or_default();
        first.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// Initialises MPI on this thread, which alone may call it from now on. Returns rank and size.
    pub fn init(&self) -> std::result::Result<(usize, usize), String> {
        let (mut flag, mut provided, mut rank, mut size) = (0, 0, 0, 0);
        // SAFETY: all pointers are to live integers, and null arguments are allowed.
        unsafe {
            self.ok("MPI_Initialized", (self.initialized)(&mut flag))?;
            if flag != 0 {
                return Err("MPI was initialised before by another part of this process".into());
            }
            let null = std::ptr::null_mut();
            let handler = handler_of(libc::SIGUSR1);
            let code = (self.init_thread)(null, null.cast(), self.dialect.funneled, &mut provided);
            self.ok("MPI_Init_thread", code)?;
            if handler_of(libc::SIGUSR1) != handler {
                ignore_deaths(handler);
            }
            let world = self.dialect.world;
            let code = (self.set_handler)(world, self.dialect.errors_return);
            self.ok("MPI_Comm_set_errhandler", code)?;
            self.ok("MPI_Comm_rank", (self.comm_rank)(world, &mut rank))?;
            self.ok("MPI_Comm_size", (self.comm_size)(world, &mut size))?;
        }
        if provided < self.dialect.funneled {
            return Err("MPI cannot be called from a thread of its own".into());
        }
        match (usize::try_from(rank), usize::try_from(size)) {
            (Ok(rank), Ok(size)) if rank < size => Ok((rank, size)),
            _ => Err(format!("MPI says that this is rank {rank} of {size}")),
        }
    }

    /// The rank and the size of the world, after `init`.
    pub fn place(&self) -> (usize, usize) {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: pointers to live integers; called on the thread that initialised MPI.
        unsafe {
            (self.comm_rank)(self.dialect.world, &mut rank);
            (self.comm_size)(self.dialect.world, &mut size);
        }
        (rank.max(0) as usize, size.max(1) as usize)
    }

    /// Ends MPI.
    pub fn finalize(&self) {
        // SAFETY: called on the thread that initialised MPI, after the last other call.
        unsafe { (self.finalize)() };
    }

    /// Starts sending a piece.
    ///
    /// # Safety
    /// The bytes stay valid and unwritten until the request has ended.
    pub unsafe fn send(
        &self,
        bytes: *const u8,
        len: c_int,
        to: usize,
        tag: c_int,
    ) -> std::result::Result<Handle, String> {
        let mut request = 0;
        let Dialect { world, byte, .. } = self.dialect;
        // SAFETY: the caller's promise.
        let code = unsafe {
            (self.isend)(
                bytes.cast(),
                len,
                byte,
                to as c_int,
                tag,
                world,
                &mut request,
            )
        };
        self.ok("MPI_Isend", code).map(|()| request)
    }

    /// Starts receiving a piece.
    ///
    /// # Safety
    /// The bytes stay valid and unused until the request has ended.
    pub unsafe fn receive(
        &self,
        bytes: *mut u8,
        len: c_int,
        from: usize,
        tag: c_int,
    ) -> std::result::Result<Handle, String> {
        let mut request = 0;
        let Dialect { world, byte, .. } = self.dialect;
        // SAFETY: the caller's promise.
        let code = unsafe {
            (self.irecv)(
                bytes.cast(),
                len,
                byte,
                from as c_int,
                tag,
                world,
                &mut request,
            )
        };
        self.ok("MPI_Irecv", code).map(|()| request)
    }

    /// Whether a request has ended, and with how many bytes if it received.
    pub fn test(
        &self,
        request: &mut Handle,
        is_receive: bool,
    ) -> std::result::Result<Option<c_int>, String> {
        let (mut status, mut flag, mut count) = (Status::new(), 0, 0);
        // SAFETY: the request was returned by this library, and has not ended; the status is at
        // least as long as that of every dialect.
        let code = unsafe { (self.test)(request, &mut flag, &mut status) };
        self.ok("MPI_Test", code)?;
        if flag == 0 {
            return Ok(None);
        }
        if is_receive {
            // SAFETY: the status is that of an ended receive.
            let code = unsafe { (self.get_count)(&status, self.dialect.byte, &mut count) };
            self.ok("MPI_Get_count", code)?;
        }
        Ok(Some(count))
    }

    fn ok(&self, call: &str, code: c_int) -> std::result::Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let mut text = vec![0_u8; 2048];
        let mut len = 0;
        // SAFETY: the buffer is longer than MPI_MAX_ERROR_STRING of every dialect.
        unsafe { (self.error_string)(code, text.as_mut_ptr().cast(), &mut len) };
        let text = String::from_utf8_lossy(&text[..(len.max(0) as usize).min(text.len())]);
        Err(format!(
            "{call} answered {code}: {}",
            text.lines().next().unwrap_or_default()
        ))
    }
}
