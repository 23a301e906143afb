//! `sluicegate request`: sends one request to a service with Envoy's rate limit protocol, and prints the response.

use std::{process::ExitCode, time::Duration};

use anyhow::{Context, bail};
use clap::Args;
use sluicegate_proto::envoy::{
    extensions::common::ratelimit::v3::{
        RateLimitDescriptor,
        rate_limit_descriptor::{Entry, RateLimitOverride},
    },
    service::ratelimit::v3::{
        RateLimitRequest, RateLimitResponse,
        rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit::Unit as LimitUnit},
        rate_limit_service_client::RateLimitServiceClient,
    },
    r#type::v3::RateLimitUnit,
};
use sluicegate_rules::{Allowance, CustomLimit, Measure, Options, Unit};
use tonic::Status;

use super::{
    entries::Entity,
    grpc::{self, Tls},
};

const EXAMPLES: &str = "Examples:
  sluicegate request shop user=bob
  sluicegate request 'shop|user=bob'
  sluicegate request shop user=bob path=/v1/charges + tenant=acme
  sluicegate request shop user=bob --hits 0
  sluicegate request --addr https://gate.example.org:8081 --ca ca.pem shop user=bob --json

Exit codes: 0 if the request is allowed, 1 if it is denied, 2 on an error.";

/// Exit code of a denied request.
const DENIED: u8 = 1;
/// Exit code if there is no response.
const ERROR: u8 = 2;
/// Response header of a request with more hits than the limit can ever allow.
const MAX_COST: &str = "RateLimit-Max-Cost";
/// End of the message if nothing listens at the address.
const NOT_LISTENING: &str = "nothing listens at this address; the gRPC port of a rate limit service is 8081 by default";
/// The argument that begins another descriptor.
const SEPARATOR: &str = "+";

#[expect(missing_docs, reason = "clap would print a comment as the help")]
#[derive(Debug, Args)]
#[command(
    after_help = EXAMPLES,
    override_usage = "sluicegate request [OPTIONS] <DOMAIN> <KEY=VALUE>... [+ <KEY=VALUE>...]..."
)]
pub struct RequestArgs {
    /// Domain of the request; or with its descriptor as `ctl top` prints it, such as 'shop|user=bob'
    domain: String,
    /// Entries of the descriptor; after a + the entries of another descriptor
    #[arg(value_name = "KEY=VALUE")]
    entries: Vec<String>,
    /// Number of hits to take; 0 returns the decision without taking hits
    #[arg(long, default_value_t = 1)]
    hits: u32,
    /// Limit to request in place of the rule's, such as 500/minute; the service may ignore it
    #[arg(long)]
    limit: Option<String>,
    /// Print the response as proto3 JSON, as `/json` has it
    #[arg(long)]
    json: bool,
    /// Address of the service's gRPC listener (http:// or https://)
    #[arg(long, env = "SLUICEGATE_GRPC", default_value = "http://127.0.0.1:8081", help_heading = "Connection")]
    addr: String,
    #[command(flatten)]
    tls: Tls,
}

/// Sends the request and prints the response. The exit code is 0 only if the request is allowed.
pub fn run(args: &RequestArgs) -> ExitCode {
    match send_and_print(args) {
        Ok(Code::OverLimit) => ExitCode::from(DENIED),
        Ok(Code::Ok | Code::Unknown) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sluicegate: {error:#}");
            ExitCode::from(ERROR)
        }
    }
}

fn send_and_print(args: &RequestArgs) -> anyhow::Result<Code> {
    let request = build_request(args)?;
    let addr = grpc::address(&args.addr)?;
    let endpoint = args.tls.endpoint(&addr)?;
    let descriptors: Vec<String> = request.descriptors.iter().map(descriptor_text).collect();
    let response = grpc::block_on(async {
        let mut client = RateLimitServiceClient::new(endpoint.connect_lazy());
        match client.should_rate_limit(request).await {
            Ok(response) => Ok(response.into_inner()),
            Err(status) => bail!("{addr}: {}", error_text(&status)),
        }
    })?;
    let code = response.overall_code();
    if args.json {
        println!("{}", grpc::json("envoy.service.ratelimit.v3.RateLimitResponse", &response)?);
    } else {
        print_response(&response, &descriptors);
    }
    if code == Code::Unknown {
        bail!("{addr}: the response has no overall_code; is this the gRPC address of a rate limit service?");
    }
    Ok(code)
}

fn build_request(args: &RequestArgs) -> anyhow::Result<RateLimitRequest> {
    let limit = args.limit.as_deref().map(requested_limit).transpose()?;
    let mut entities = Vec::new();
    let mut domain = args.domain.clone();
    for (number, entries) in args.entries.split(|entry| entry == SEPARATOR).enumerate() {
        if number > 0 && entries.is_empty() {
            bail!("a descriptor must follow the {SEPARATOR}");
        }
        let entity = Entity::read(if number == 0 { &args.domain } else { &domain }, entries)?;
        domain.clone_from(&entity.domain);
        entities.push(entity.entries);
    }
    let mut descriptors = Vec::new();
    for entries in entities {
        let entries = entries.into_iter().map(|(key, value)| Entry { key, value }).collect();
        // The 0 of a request means 1. Only that of a descriptor takes no hits.
        let hits_addend = if args.hits == 0 { Some(0) } else { None };
        descriptors.push(RateLimitDescriptor { entries, limit, hits_addend, ..RateLimitDescriptor::default() });
    }
    Ok(RateLimitRequest { domain, descriptors, hits_addend: args.hits })
}

fn requested_limit(text: &str) -> anyhow::Result<RateLimitOverride> {
    let limit = CustomLimit::read(text, Options::default()).ok().with_context(|| not_available(text))?;
    let Measure::Rate { unit, multiplier } = limit.limit.measure() else {
        bail!(not_available(text));
    };
    if limit.allowance != Allowance::Limited || !limit.limit.is_default() {
        bail!(not_available(text));
    }
    let unit = match unit {
        Unit::Second => RateLimitUnit::Second,
        Unit::Minute => RateLimitUnit::Minute,
        Unit::Hour => RateLimitUnit::Hour,
        Unit::Day => RateLimitUnit::Day,
        Unit::Month => RateLimitUnit::Month,
        Unit::Year => RateLimitUnit::Year,
        Unit::Week => bail!("the protocol has no requested limits per week"),
    };
    let unit_multiplier = if multiplier == 1 { None } else { Some(multiplier) };
    let requests = limit.limit.requests();
    let Ok(requests_per_unit) = u32::try_from(requests) else {
        bail!("the protocol supports requested limits up to 4294967295, not {requests}");
    };
    Ok(RateLimitOverride { requests_per_unit, unit: unit.into(), unit_multiplier })
}

/// Returns the message about a limit that the protocol cannot express.
fn not_available(text: &str) -> String {
    format!("{text:?} cannot be requested: use a number per unit, such as 500/minute")
}

/// Returns the message of an error. A service of another port does not know the method.
fn error_text(status: &Status) -> String {
    let message = grpc::message(status, NOT_LISTENING);
    match status.code() {
        tonic::Code::Unimplemented => {
            "this is not the gRPC address of a rate limit service (default port 8081; 8080 is \
                                       HTTP, 8082 the admin API)"
                .to_owned()
        }
        tonic::Code::Unauthenticated | tonic::Code::PermissionDenied => {
            format!("{message}; is this the gRPC address (default port 8081) and not the admin address?")
        }
        code => format!("{message} ({code:?})"),
    }
}

fn descriptor_text(descriptor: &RateLimitDescriptor) -> String {
    let entries: Vec<String> =
        descriptor.entries.iter().map(|entry| format!("{}={}", entry.key, entry.value)).collect();
    entries.join(" ")
}

fn print_response(response: &RateLimitResponse, descriptors: &[String]) {
    let decision = match response.overall_code() {
        Code::Ok => "the request is allowed",
        Code::OverLimit => "the request is denied",
        Code::Unknown => "no decision",
    };
    println!("{}: {decision}", response.overall_code().as_str_name());
    for (number, status) in response.statuses.iter().enumerate() {
        let name = match descriptors.get(number) {
            Some(descriptor) => descriptor,
            None => "another descriptor",
        };
        println!("{name}: {}", status_text(status));
    }
    for header in &response.response_headers_to_add {
        println!("response header {}: {}", header.key, header.value);
        if header.key.eq_ignore_ascii_case(MAX_COST) {
            println!("never: the limit allows at most {} hits in one request", header.value);
        }
    }
    for header in &response.request_headers_to_add {
        println!("request header {}: {}", header.key, header.value);
    }
}

fn status_text(status: &DescriptorStatus) -> String {
    let code = status.code().as_str_name();
    let Some(limit) = &status.current_limit else {
        return match status.code() {
            Code::OverLimit => format!("{code}, denied without a limit"),
            Code::Ok | Code::Unknown => format!("{code}, no rule matched, or its rule is unlimited"),
        };
    };
    let mut text = format!("{code}, limit {}, remaining {}", limit_text(limit), status.limit_remaining);
    if let Some(reset) = &status.duration_until_reset {
        let reset = Duration::try_from(*reset).unwrap_or_default();
        text += &format!(", reset in {}", humantime::format_duration(reset));
    }
    text
}

/// Returns the limit as `ctl` prints it.
fn limit_text(limit: &RateLimit) -> String {
    let unit = limit.unit().as_str_name().to_lowercase();
    let mut text = match (limit.unit(), limit.unit_multiplier.unwrap_or(1)) {
        (LimitUnit::Unknown, _) => limit.requests_per_unit.to_string(),
        (_, 1) => format!("{} per {unit}", limit.requests_per_unit),
        (_, multiplier) => format!("{} per {multiplier} {unit}s", limit.requests_per_unit),
    };
    if !limit.name.is_empty() {
        text += &format!(" named {:?}", limit.name);
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: RequestArgs,
    }

    fn request(arguments: &[&str]) -> anyhow::Result<RateLimitRequest> {
        build_request(&Line::try_parse_from([&["request"], arguments].concat()).unwrap().args)
    }

    #[test]
    fn a_plus_begins_another_descriptor() {
        let request = request(&["shop", "user=bob", "path=/a", "+", "tenant=acme", "--hits", "3"]).unwrap();
        let descriptors: Vec<String> = request.descriptors.iter().map(descriptor_text).collect();
        assert_eq!((request.domain.as_str(), request.hits_addend), ("shop", 3));
        assert_eq!(descriptors, ["user=bob path=/a", "tenant=acme"]);
        assert!(request.descriptors.iter().all(|descriptor| descriptor.hits_addend.is_none()));
    }

    #[test]
    fn a_printed_descriptor_can_be_followed_by_others() {
        let request = request(&["shop|user=bob", "+", "tenant=acme"]).unwrap();
        let descriptors: Vec<String> = request.descriptors.iter().map(descriptor_text).collect();
        assert_eq!((request.domain.as_str(), descriptors), ("shop", vec!["user=bob".to_owned(), "tenant=acme".into()]));
    }

    #[test]
    fn no_hits_are_those_of_each_descriptor() {
        let request = request(&["shop", "user=bob", "+", "tenant=acme", "--hits", "0"]).unwrap();
        assert!(request.descriptors.iter().all(|descriptor| descriptor.hits_addend == Some(0)));
    }

    #[test]
    fn only_a_number_per_unit_can_be_requested() {
        let limit = |text| {
            let request = request(&["shop", "user=bob", "--limit", text])?;
            Ok::<_, anyhow::Error>(request.descriptors[0].limit.map(|limit| (limit.requests_per_unit, limit.unit())))
        };
        assert_eq!(limit("500/minute").unwrap(), Some((500, RateLimitUnit::Minute)));
        assert_eq!(limit("5 per year").unwrap(), Some((5, RateLimitUnit::Year)));
        let several = request(&["shop", "user=bob", "--limit", "5 per 2 hours"]).unwrap();
        assert_eq!(several.descriptors[0].limit.and_then(|limit| limit.unit_multiplier), Some(2));
        for text in ["unlimited", "blocked", "lots", "5/week", "5 per day, gcra"] {
            assert!(limit(text).is_err(), "{text}");
        }
    }

    #[test]
    fn descriptors_without_entries_are_errors() {
        for arguments in [&["shop"][..], &["shop", "user=bob", "+"], &["shop", "+", "user=bob"], &["shop", "user"]] {
            assert!(request(arguments).is_err(), "{arguments:?}");
        }
    }
}
