//! The calls of MPI, bound to a library, with the constants of its dialect.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};

use crate::library::Dialect;

/// A handle: a pointer, or an integer in its low half.
pub(crate) type Handle = isize;

/// Room for a status of any dialect.
pub(crate) type Status = [u64; 32];

type InitThread = unsafe extern "C" fn(*mut c_int, *mut c_void, c_int, *mut c_int) -> c_int;
type CommNumber = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
type SetErrhandler = unsafe extern "C" fn(Handle, Handle) -> c_int;
type Exchange = unsafe extern "C" fn(
    *const c_void,
    c_int,
    Handle,
    *mut c_void,
    c_int,
    Handle,
    Handle,
    *mut Handle,
) -> c_int;
type Test = unsafe extern "C" fn(*mut Handle, *mut c_int, *mut Status) -> c_int;
type ErrorString = unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int;
type Finalize = unsafe extern "C" fn() -> c_int;

/// A library of MPI that is open.
pub(crate) struct Calls {
    world: Handle,
    byte: Handle,
    errors_return: Handle,
    init_thread: InitThread,
    comm_rank: CommNumber,
    comm_size: CommNumber,
    set_errhandler: SetErrhandler,
    all_to_all: Exchange,
    all_gather: Exchange,
    test: Test,
    error_string: ErrorString,
    finalize: Finalize,
}

/// The most bytes of an error's text, in any dialect.
const TEXT: usize = 8192;

impl Calls {
    /// Opens a library for the rest of the process.
    pub fn open(file: &Path) -> Result<(Calls, Dialect), String> {
        // SAFETY: loading runs the library's initialisers; it is a library of MPI by its name or by
        // the user's word, and stays open. Open MPI's plugins need its symbols to be global.
        let library = unsafe { Library::open(Some(file), RTLD_NOW | RTLD_GLOBAL) };
        let library = library.map_err(|e| e.to_string())?;
        let address = |name: &str| -> Option<Handle> {
            // SAFETY: only the address of the symbol is taken.
            let symbol: Result<Symbol<*mut c_void>, _> = unsafe { library.get(name.as_bytes()) };
            symbol.ok().map(|s| s.into_raw() as Handle)
        };
        let is_standard = file
            .file_name()
            .is_some_and(|name| name.to_string_lossy().contains("mpi_abi"));
        let (dialect, world, byte, errors_return) = if is_standard {
            (Dialect::Standard, 0x101, 0x247, 0x143)
        } else if let Some(world) = address("ompi_mpi_comm_world") {
            let [byte, errors] = ["ompi_mpi_byte", "ompi_mpi_errors_return"].map(address);
            let (byte, errors) = byte.zip(errors).ok_or("it lacks Open MPI's constants")?;
            (Dialect::OpenMpi, world, byte, errors)
        } else {
            (Dialect::Mpich, 0x4400_0000, 0x4c00_010d, 0x5400_0001)
        };
        macro_rules! call {
            ($name:literal, $type:ty) => {{
                // SAFETY: the type is the one that the standard declares for this name, with handles
                // in registers wide enough for every dialect.
                let symbol: Result<Symbol<$type>, _> = unsafe { library.get($name.as_bytes()) };
                *symbol.map_err(|_| concat!("it has no ", $name))?
            }};
        }
        let calls = Calls {
            world,
            byte,
            errors_return,
            init_thread: call!("MPI_Init_thread", InitThread),
            comm_rank: call!("MPI_Comm_rank", CommNumber),
            comm_size: call!("MPI_Comm_size", CommNumber),
            set_errhandler: call!("MPI_Comm_set_errhandler", SetErrhandler),
            all_to_all: call!("MPI_Ialltoall", Exchange),
            all_gather: call!("MPI_Iallgather", Exchange),
            test: call!("MPI_Test", Test),
            error_string: call!("MPI_Error_string", ErrorString),
            finalize: call!("MPI_Finalize", Finalize),
        };
        std::mem::forget(library);
        Ok((calls, dialect))
    }

    fn check(&self, call: &str, status: c_int) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        let mut text = [0u8; TEXT];
        let mut length = 0;
        // SAFETY: the text has room for the longest error of every dialect.
        unsafe { (self.error_string)(status, text.as_mut_ptr().cast(), &mut length) };
        let text = &text[..usize::try_from(length).unwrap_or(0).min(TEXT)];
        let text = String::from_utf8_lossy(text);
        Err(format!("{call} answered {status}: {}", text.trim()))
    }

    /// Joins the world of the launcher: this rank, and the number of ranks.
    pub fn init(&self) -> Result<(usize, usize), String> {
        const FUNNELED: c_int = 1;
        let (mut provided, mut rank, mut ranks) = (0, 0, 0);
        // SAFETY: MPI may be initialised without arguments, once; this thread alone calls it from
        // here on.
        unsafe {
            let none = std::ptr::null_mut();
            let status = (self.init_thread)(std::ptr::null_mut(), none, FUNNELED, &mut provided);
            self.check("MPI_Init_thread", status)?;
            self.check("MPI_Comm_rank", (self.comm_rank)(self.world, &mut rank))?;
            self.check("MPI_Comm_size", (self.comm_size)(self.world, &mut ranks))?;
            let status = (self.set_errhandler)(self.world, self.errors_return);
            self.check("MPI_Comm_set_errhandler", status)?;
        }
        let number = |n: c_int| usize::try_from(n).map_err(|_| format!("a rank of {n}"));
        Ok((number(rank)?, number(ranks)?))
    }

    /// Starts an exchange of `part` bytes with each rank.
    ///
    /// # Safety
    /// `send` holds `part` bytes, of every rank if `to_all`, and `receive` has room for those of
    /// every rank; both stay where they are, and nothing else touches them, until the request is
    /// [done](Calls::done).
    pub unsafe fn start(
        &self,
        to_all: bool,
        part: c_int,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<Handle, String> {
        let mut request: Handle = 0;
        let (call, name) = if to_all {
            (self.all_to_all, "MPI_Ialltoall")
        } else {
            (self.all_gather, "MPI_Iallgather")
        };
        // SAFETY: the caller's promise; the request has room for a handle of every dialect.
        let status = unsafe {
            call(
                send.cast(),
                part,
                self.byte,
                receive.cast(),
                part,
                self.byte,
                self.world,
                &mut request,
            )
        };
        self.check(name, status).map(|()| request)
    }

    /// Whether a request has been completed.
    pub fn done(&self, request: &mut Handle) -> Result<bool, String> {
        let mut done = 0;
        let mut status: Status = [0; 32];
        // SAFETY: the request is one of `start` that is not completed yet.
        let answer = unsafe { (self.test)(request, &mut done, &mut status) };
        self.check("MPI_Test", answer).map(|()| done != 0)
    }

    /// Leaves the world.
    pub fn finalize(&self) {
        // SAFETY: the thread that initialised MPI calls it last.
        unsafe { (self.finalize)() };
    }
}
