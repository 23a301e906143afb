//! The role that each method requires, which is checked before its message is read.

use tonic::Status;

use super::auth::{Caller, Role};

/// The methods for callers without a token, with the role `public` in their comments.
const PUBLIC_METHODS: [&str; 6] =
    ["ListRules", "GetHealth", "GetSession", "WatchActivity", "ListRuleActivity", "ReadDescriptors"];
/// The methods that change state, with the role `operate` in their comments.
const OPERATE_METHODS: [&str; 7] =
    ["PutOverrides", "ResetCounter", "Refund", "UploadCandidate", "DropCandidate", "PromoteCandidate", "RollbackRules"];

/// Checks whether a caller may call a method.
///
/// # Errors
///
/// Returns an error if the caller does not have the role that the method requires.
pub(super) fn authorize(caller: &Caller, method: &str) -> Result<(), Status> {
    if OPERATE_METHODS.contains(&method) {
        return require_operate(caller);
    }
    if caller.role < Role::Read && !PUBLIC_METHODS.contains(&method) {
        return Err(Status::permission_denied(
            "this method requires a token with the role read or operate (authorization: Bearer TOKEN), or the setting \
             console.entities",
        ));
    }
    Ok(())
}

/// Checks whether a caller has the role `operate`.
///
/// # Errors
///
/// Returns an error if the caller has another role.
pub(super) fn require_operate(caller: &Caller) -> Result<(), Status> {
    if caller.role >= Role::Operate {
        return Ok(());
    }
    if caller.name.is_empty() {
        return Err(Status::permission_denied("this method requires a token with the role operate"));
    }
    let name = &caller.name;
    Err(Status::permission_denied(format!("{name} has the role read, and this method requires the role operate")))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{json::SERVICE, openapi::comment},
        *,
    };

    /// Returns the methods with comments that contain a text.
    fn methods_with(text: &str) -> Vec<String> {
        let service = SERVICE.as_ref().unwrap();
        let has_text = |method: &prost_reflect::MethodDescriptor| {
            let words: Vec<_> =
                comment(&method.parent_file(), method.path()).split_whitespace().map(str::to_owned).collect();
            words.join(" ").contains(text)
        };
        service.methods().filter(has_text).map(|method| method.name().to_owned()).collect()
    }

    #[test]
    fn the_comments_of_methods_name_the_role() {
        assert_eq!(methods_with("role `public`"), PUBLIC_METHODS);
        let mut operate = methods_with("Requires the role `operate`");
        operate.sort();
        let mut listed = OPERATE_METHODS;
        listed.sort_unstable();
        assert_eq!(operate, listed);
    }

    #[test]
    fn each_role_may_call_the_methods_of_the_one_before() {
        let code = |role, method| {
            let caller = Caller { name: "eve".into(), role };
            authorize(&caller, method).map_err(|status| status.code())
        };
        for (role, permitted) in [(Role::Public, 1), (Role::Read, 2), (Role::Operate, 3)] {
            for (number, method) in ["GetSession", "Inspect", "PutOverrides"].into_iter().enumerate() {
                assert_eq!(code(role, method).is_ok(), number < permitted, "{role:?} {method}");
            }
        }
    }
}
