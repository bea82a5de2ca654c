//! Horizontal fusion: several small specs in one launch, such as the updates of an optimizer, which
//! are one program over parameters of different sizes.

use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Body, Spec, SpecError};

use crate::abi::{Dispatch, Target, Word};
use crate::lowered::Lowered;
use crate::source::{SharedLoop, elementwise, rows};

/// Specs that are launched together.
#[derive(Debug)]
pub struct FusedLaunch {
    /// The numbers of the specs.
    pub members: Vec<usize>,
    /// Their launches; `Word::Argument` counts the arguments of all members, one after the other.
    pub lowered: Lowered,
}

/// A member of a group of specs with one function.
struct Member {
    shared: SharedLoop,
    /// The number of arguments of earlier members.
    first: u16,
}

/// The shareable form of a spec; `None` unless it is a loop that is one kernel.
fn shared(spec: &Spec, bounds: &Env, target: &Target) -> Result<Option<SharedLoop>, SpecError> {
    match &spec.body {
        Body::Loop if spec.stores.is_empty() => Ok(None),
        Body::Loop if spec.reduced == 0 => {
            Ok(Some(elementwise::lower_shared(spec, bounds, target)?))
        }
        Body::Loop => rows::lower_shared(spec, bounds, target),
        _ => Ok(None),
    }
}

/// The name of the function that a spec would share with others: specs with equal names can be
/// fused into one launch. `None` for a spec that cannot be fused.
///
/// # Errors
/// See [`super::lower`].
pub fn fused_name(spec: &Spec, bounds: &Env, target: &Target) -> Result<Option<String>, SpecError> {
    Ok(shared(spec, bounds, target)?.map(|shared| shared.function.name))
}

/// Source for specs that may run in any order or concurrently: loops with the same function share a
/// launch, as many as its parameter holds. Specs of other kinds are launched separately.
///
/// # Errors
/// See [`super::lower`].
pub fn lower_fused(
    specs: &[&Spec],
    bounds: &Env,
    target: &Target,
) -> Result<Vec<FusedLaunch>, SpecError> {
    let mut groups: Vec<(Vec<usize>, Vec<Member>)> = Vec::new();
    let mut all = Vec::new();
    for (at, spec) in specs.iter().enumerate() {
        let Some(shared) = shared(spec, bounds, target)? else {
            all.push(FusedLaunch {
                members: vec![at],
                lowered: super::lower(spec, bounds, target)?,
            });
            continue;
        };
        let known = groups
            .iter()
            .position(|(_, list)| list[0].shared.function == shared.function)
            .unwrap_or_else(|| {
                groups.push((vec![], vec![]));
                groups.len() - 1
            });
        let (members, list) = &mut groups[known];
        // Equal functions have equally many arguments.
        let first = (spec.arguments().len() * list.len()) as u16;
        members.push(at);
        list.push(Member { shared, first });
    }
    for (members, list) in groups {
        let function = list[0].shared.function.clone();
        let launches = move |env: &Env| -> Vec<Dispatch> {
            list.chunks(list[0].shared.params.launch_members())
                .map(|chunk| dispatch(chunk, env))
                .collect()
        };
        all.push(FusedLaunch {
            members,
            lowered: Lowered::new(vec![function], 0, launches),
        });
    }
    all.sort_by_key(|launch| launch.members[0]);
    Ok(all)
}

/// One launch for these members: the second coordinate of a block is the number of its member.
fn dispatch(members: &[Member], env: &Env) -> Dispatch {
    let first = &members[0].shared;
    let mut words = Vec::new();
    for member in members {
        let start = words.len();
        words.extend(member.shared.params.words(env));
        for word in &mut words[start..] {
            if let Word::Argument(argument) = word {
                *argument += member.first;
            }
        }
    }
    // Unused places at the end have no blocks.
    words.resize(
        words.len() / members.len() * first.params.launch_members(),
        Word::Number(0),
    );
    let blocks = members
        .iter()
        .map(|member| (member.shared.blocks)(env))
        .max()
        .unwrap_or(0);
    let shared_bytes = members.iter().map(|member| member.shared.shared_bytes);
    let grid = [blocks, members.len() as u32, 1];
    Dispatch {
        function: 0,
        grid,
        block: [first.threads, 1, 1],
        shared_bytes: shared_bytes.max().unwrap_or(0),
        words,
    }
}
