{{- /* Names and labels. Templates of one service take (dict "root" $ "name" "verify"). */ -}}

{{- define "canopy.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "canopy.serviceName" -}}
{{ include "canopy.fullname" .root }}-{{ .name }}
{{- end -}}

{{- define "canopy.chartLabels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "canopy.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{- define "canopy.labels" -}}
{{ include "canopy.selector" . }}
{{ include "canopy.chartLabels" .root }}
{{- end -}}

{{- define "canopy.serviceAccount" -}}
{{- $own := include "canopy.fullname" . -}}
{{- default (ternary $own "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- /* The services that are rendered, as a JSON list. */ -}}
{{- define "canopy.services" -}}
{{- $names := list "router" "verify" -}}
{{- if .Values.draft.enabled }}{{ $names = append $names "draft" }}{{ end -}}
{{- toJson $names -}}
{{- end -}}

{{- /* gRPC names, as the health service knows them. */ -}}
{{- define "canopy.grpcName" -}}
{{- get (dict "router" "canopy.v1.GenerationService" "draft" "canopy.v1.DraftService" "verify" "canopy.v1.VerifyService") .name -}}
{{- end -}}

{{- define "canopy.port" -}}
{{- if eq .name "router" }}{{ .root.Values.router.service.port }}{{ else }}{{ (get .root.Values .name).port }}{{ end -}}
{{- end -}}

{{- /* The slice of a service, as JSON: platform, chip, accelerator, topology, chipsPerHost, hosts. */ -}}
{{- define "canopy.slice" -}}
{{- $slices := .root.Files.Get "files/slices.yaml" | fromYaml -}}
{{- $own := get .root.Values .name -}}
{{- if eq .name "router" -}}
{{- toJson $slices.cpu -}}
{{- else if eq $own.slice "custom" -}}
{{- range $field := list "chip" "accelerator" "topology" -}}
{{- if and (eq $own.customSlice.platform "tpu") (not (get $own.customSlice $field)) -}}
{{- fail (printf "%s.customSlice.%s: empty; a custom slice of TPUs names its chip, accelerator and topology" $.name $field) -}}
{{- end -}}
{{- end -}}
{{- toJson $own.customSlice -}}
{{- else -}}
{{- toJson (get $slices $own.slice) -}}
{{- end -}}
{{- end -}}

{{- /* The headless Service that gives pods their names. A LeaderWorkerSet's controller makes its own,
       of the set's name; ours then is for the leaders alone. */ -}}
{{- define "canopy.headlessName" -}}
{{- $slice := include "canopy.slice" . | fromJson -}}
{{- $suffix := "" -}}
{{- if eq .name "router" }}{{ $suffix = "-headless" }}{{ else if gt (int $slice.hosts) 1 }}{{ $suffix = "-leader" }}{{ end -}}
{{ include "canopy.serviceName" . }}{{ $suffix }}
{{- end -}}

{{- define "canopy.image" -}}
{{- $image := (get .root.Values .name).image -}}
{{- $repository := $image.repository -}}
{{- with .root.Values.image.registry }}{{ $repository = printf "%s/%s" . $repository }}{{ end -}}
{{- if $image.digest -}}
{{ $repository }}@{{ $image.digest }}
{{- else -}}
{{ $repository }}:{{ default .root.Chart.AppVersion .root.Values.image.tag }}
{{- end -}}
{{- end -}}
