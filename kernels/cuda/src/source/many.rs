//! Several small specs in one launch: the updates of an optimizer, which are one program over parameters of different sizes.

use slabwise_kernels::cpu::SpecError;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::Spec;

use super::elementwise::{launch, lower_shared};
use super::params::Params;
use super::space::Space;
use crate::lower::{Dispatch, Function, Lowered, Target, Word};

/// Specs that are run together.
#[derive(Debug)]
pub struct Together {
    /// Which of the specs.
    pub members: Vec<usize>,
    /// Their launches; `Word::Argument` counts the arguments of all members, one after the other.
    pub lowered: Lowered,
}

/// A spec among others of one function.
struct Member {
    params: Params,
    width: i64,
    space: Space,
    /// Arguments of the members before it.
    first: u16,
}

/// Source for specs that may run in any order, or at once: loops without reductions that come to the same function are run by
/// one launch, as many as its parameter has room for. Specs of other kinds stay alone.
///
/// # Errors
/// As [`super::lower`].
pub fn lower_many(specs: &[&Spec], bounds: &Env, target: &Target) -> Result<Vec<Together>, SpecError> {
    let mut groups: Vec<(Function, Vec<usize>, Vec<Member>)> = Vec::new();
    let mut all = Vec::new();
    for (at, spec) in specs.iter().enumerate() {
        let Some((function, params, width, space)) = lower_shared(spec, bounds, target)? else {
            all.push(Together { members: vec![at], lowered: super::lower(spec, bounds, target)? });
            continue;
        };
        let arguments = spec.arguments().len() as u16;
        let known = groups.iter().position(|(f, ..)| *f == function).unwrap_or_else(|| {
            groups.push((function, vec![], vec![]));
            groups.len() - 1
        });
        let (_, members, list) = &mut groups[known];
        // Equal functions have equally many arguments.
        let first = arguments * list.len() as u16;
        members.push(at);
        list.push(Member { params, width, space, first });
    }
    for (function, members, list) in groups {
        let target = *target;
        let launches = move |env: &Env| -> Vec<Dispatch> {
            list.chunks(list[0].params.together()).map(|chunk| dispatch(chunk, env, &target)).collect()
        };
        all.push(Together { members, lowered: Lowered::new(vec![function], 0, launches) });
    }
    all.sort_by_key(|together| together.members[0]);
    Ok(all)
}

/// One launch for these members.
fn dispatch(members: &[Member], env: &Env, target: &Target) -> Dispatch {
    let of = |member: &Member| {
        let mut one = launch(0, member.space.points(env), member.width, &member.params, env, target);
        for word in &mut one.words {
            if let Word::Argument(argument) = word {
                *argument += member.first;
            }
        }
        one
    };
    let mut launches = members.iter().map(of);
    let mut whole = launches.next().expect("groups have members");
    let each = whole.words.len();
    for next in launches {
        whole.grid[0] = whole.grid[0].max(next.grid[0]);
        whole.words.extend(next.words);
    }
    // Places without a member are not launched.
    whole.words.resize(each * members[0].params.together(), Word::Number(0));
    whole.grid[1] = members.len() as u32;
    whole
}
